"""Process groups are aborted where that ends anything, on both sides of a sync. Recorded ones stand for NCCL's."""

from __future__ import annotations

import queue
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from slime_like.utils.net import listen_at
from slime_like.weight_sync import group_abort
from slime_like.weight_sync.group_abort import abort_group, destroy_left_groups, leave_group
from slime_like.weight_sync.in_engine.groups import _Source
from slime_like.weight_sync.transports.broadcast import BroadcastPublisher, _join_group
from slime_like.weight_sync.transports.registry import PublisherOptions


class RecordedGroup:
    """A process group that writes down that it was aborted. raises: what its abort does instead; waits: until then."""

    def __init__(self, backend: str = "nccl", *, raises: str = "", waits: threading.Event | None = None):
        self.backend, self.raises, self.waits = backend, raises, waits
        self.is_aborted = False

    def name(self) -> str:
        return self.backend

    def abort(self) -> None:
        if self.raises:
            raise RuntimeError(self.raises)
        if self.waits is not None:
            self.waits.wait(60)
        self.is_aborted = True


def test_a_group_that_was_let_go_of_is_ended_once_its_deadline_has_passed(monkeypatch):
    """A trainer that outlives engines kept the sockets and threads of every such group."""
    sockets = psutil.Process().num_fds()
    listener = listen_at("127.0.0.1")
    with listener:
        group = _join_group("gloo", listener, 1, "alone", 5.0)
    assert psutil.Process().num_fds() > sockets
    leave_group(group, "me", timeout_s=60.0)
    destroy_left_groups()
    assert dist.distributed_c10d._world.pg_map.get(group) is not None
    later = time.monotonic() + 61.0
    monkeypatch.setattr(group_abort.time, "monotonic", lambda: later)
    destroy_left_groups()
    assert dist.distributed_c10d._world.pg_map.get(group) is None
    leave_group(RecordedGroup(), "me", timeout_s=0.0)
    leave_group(RecordedGroup(raises="NCCL is in ruins"), "me", timeout_s=0.0)
    assert [left for left, _ in group_abort._left] == []
    leave_group(group, "me", timeout_s=0.0)
    later += 1.0
    destroy_left_groups()  # an aborted one is not there to be destroyed, nor one that torch does not know any more


def test_nccl_is_aborted_and_gloo_cannot_be():
    nccl, gloo = RecordedGroup(), RecordedGroup("gloo")
    assert abort_group(nccl, "me") and nccl.is_aborted
    assert not abort_group(gloo, "me") and not gloo.is_aborted


def test_a_real_group_says_what_it_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None and dist.group.WORLD.name() == "gloo"
        assert not abort_group(dist.group.WORLD, "me")
    finally:
        dist.destroy_process_group()


def test_an_abort_that_fails_or_hangs_is_told_and_lasts_no_longer_than_its_deadline(caplog):
    assert not abort_group(RecordedGroup(raises="NCCL is in ruins"), "trainer source 0")
    assert "trainer source 0" in caplog.text and "NCCL is in ruins" in caplog.text
    ends = threading.Event()
    assert not abort_group(RecordedGroup(waits=ends), "engine 1", timeout_s=0.05)
    assert "not done after 0.05 s" in caplog.text
    ends.set()


def test_a_source_whose_sending_failed_aborts_its_group_before_it_makes_another():
    publisher = BroadcastPublisher(PublisherOptions("broadcast", (), 0, 1, 1000, 5.0, None, "127.0.0.1", sources=None))
    group = RecordedGroup()
    publisher._group = group

    def tensors():
        raise ValueError("gathering failed")
        yield

    with pytest.raises(ValueError, match="gathering failed"):
        publisher.send(tensors(), 1)
    assert group.is_aborted and publisher._group is None


def test_an_engine_that_stops_to_receive_aborts_its_side():
    source, group = _Source.__new__(_Source), RecordedGroup()
    source.free, source.group, source._me = queue.SimpleQueue(), group, "engine 0, rank 0"
    source.stop()
    assert group.is_aborted and source.free.get(timeout=1) is None
