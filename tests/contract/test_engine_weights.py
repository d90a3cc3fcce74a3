"""Every transport changes the weights of a real engine to exactly those sent, at one and two ranks, and to several engines at once."""

from __future__ import annotations

import time

import pytest
import torch

from slime_like.errors import EngineError
from slime_like.weight_sync.base import make_publisher
from tests.contract.engines import largest_difference, options, prompt, sync

TRANSPORTS = ("ipc", "broadcast", "disk")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_become_those_of_another_seed(tp1, tp2, models, tmp_path, transport):
    """Two engines, of one and of two ranks, receive from one source; then back again over the same connection."""
    publisher = make_publisher(options([tp1, tp2], transport, directory=tmp_path))
    publisher.connect()
    for seed in (2, 1):
        assert max(largest_difference(one.client, models[seed]) for one in (tp1, tp2)) > 0.1 or seed == 1
        (report,) = sync([tp1, tp2], models[seed], [publisher], transport, tmp_path)
        state = models[seed].state_dict()
        assert (report.num_tensors, report.num_bytes) == (len(state), sum(t.numel() * 4 for t in state.values()))
        for one in (tp1, tp2):
            assert largest_difference(one.client, models[seed]) < 1e-5
            assert one.client.weight_version() == str(one.version)
            answer = one.client.generate(prompt(1), {"max_new_tokens": 1})
            assert answer["meta_info"]["weight_version"] == str(one.version)
    publisher.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_sources_send_one_after_another(served, models, tmp_path, transport):
    publishers = [make_publisher(options([served], transport, source=i, num_sources=2, directory=tmp_path)) for i in range(2)]
    reports = sync([served], models[2], publishers, transport, tmp_path)
    assert all(report.num_tensors > 0 for report in reports)
    assert largest_difference(served.client, models[2]) < 1e-5
    for publisher in publishers:
        publisher.close()


def test_all_transports_leave_the_same_bits(served, models, tmp_path):
    checksums, digests = set(), set()
    for transport in TRANSPORTS:
        publisher = make_publisher(options([served], transport, directory=tmp_path))
        sync([served], models[1], [publisher], transport, tmp_path)
        (report,) = sync([served], models[2], [publisher], transport, tmp_path)
        checksums.add(str(served.client.weights_checksum()))
        digests.add(report.digest)
        publisher.close()
    assert len(checksums) == len(digests) == 1


def test_broadcast_beside_the_trainers_own_process_group(served, models):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        publisher = make_publisher(options([served], "broadcast"))
        sync([served], models[2], [publisher], "broadcast")
        assert largest_difference(served.client, models[2]) < 1e-5
        publisher.close()
        torch.distributed.barrier()  # the default group is untouched
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_refused_weights_fail_at_once_and_the_next_sync_works(served, models, transport):
    publisher = make_publisher(options([served], transport))
    publisher.connect()
    start = time.monotonic()
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        publisher.send(iter(models[2].state_dict().items()), 99)
    assert time.monotonic() - start < 5
    sync([served], models[2], [publisher], transport)
    assert largest_difference(served.client, models[2]) < 1e-5
    publisher.close()


def test_missing_version_on_disk(served, tmp_path):
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        served.client.update_weights_from_disk(str(tmp_path / "nothing"))


def test_weights_go_in_while_the_cache_is_released(served, models, tmp_path):
    """The order of a colocated step: release all, train, resume weights, sync, resume the cache, generate."""
    client = served.client
    client.flush_cache()
    client.release_memory_occupation(["kv_cache", "weights"])
    client.resume_memory_occupation(["weights"])
    publisher = make_publisher(options([served], "ipc"))
    sync([served], models[2], [publisher], "ipc")
    client.resume_memory_occupation(["kv_cache"])
    assert largest_difference(client, models[2]) < 1e-5
    publisher.close()
