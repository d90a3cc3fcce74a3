"""Every transport changes the weights of a real engine to exactly those sent, at one and two ranks, and to several
engines at once.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slime_like.errors import EngineError, WeightSyncError
from slime_like.utils.net import wait_until
from slime_like.weight_sync.session import EngineSide, abandon
from slime_like.weight_sync.transports import broadcast
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import hf_logprobs, largest_difference, options, order_of, prompt, sync, two_sources

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
def test_two_sources_send_at_the_same_time_with_many_buckets(tp1, tp2, models, tmp_path, transport):
    both = [tp1, tp2]
    publishers = [
        make_publisher(
            dataclasses.replace(
                options(both, transport, source=i, num_sources=2, directory=tmp_path),
                sources=known,
                buffer_bytes=20_000,
            )
        )
        for i, known in enumerate(two_sources())
    ]
    for publisher in publishers:
        publisher.connect()
    for seed in (2, 1):
        reports = sync(both, models[seed], publishers, transport, tmp_path)
        assert all(report.num_tensors > 0 for report in reports)
        assert max(largest_difference(one.client, models[seed]) for one in both) < 1e-5
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_source_that_fails_in_the_middle_lets_engines_go_at_once(served, models, transport):
    """Every engine answers, the other source hears why, and the next sync works over the same engines."""
    publishers = [
        make_publisher(
            dataclasses.replace(
                options([served], transport, source=i, num_sources=2), sources=known, buffer_bytes=20_000
            )
        )
        for i, known in enumerate(two_sources())
    ]
    for publisher in publishers:
        publisher.connect()
    tensors = list(models[2].state_dict().items())

    def broken():
        yield from tensors[:3]
        raise RuntimeError("no memory")

    start = time.monotonic()
    update = EngineSide(order_of([served.client.endpoint], transport, 99))
    update.begin()
    with ThreadPoolExecutor() as pool:
        first, second = (
            pool.submit(publishers[0].send, iter(tensors), 99),
            pool.submit(publishers[1].send, broken(), 99),
        )
        with pytest.raises(RuntimeError, match="no memory"):
            second.result(20)
        with pytest.raises(WeightSyncError, match="no memory|gave up|went away"):
            first.result(20)
    abandon([served.client.endpoint])
    assert served.client.health() is not None and time.monotonic() - start < 15
    for publisher in publishers:
        publisher.close()
    publisher = make_publisher(options([served], transport))
    sync([served], models[2], [publisher], transport)
    assert largest_difference(served.client, models[2]) < 1e-5
    publisher.close()


def test_engines_without_our_loader_get_a_request_for_every_bucket(tp1, tp2, models, monkeypatch):
    """Two sources with many buckets each, in threads: without turns the two engines could begin with one of each, and
    wait for ever.
    """
    monkeypatch.setattr(broadcast, "takes_channels", lambda client: False)
    both = [tp1, tp2]
    publishers = [
        make_publisher(
            dataclasses.replace(
                options(both, "broadcast", source=i, num_sources=2), sources=known, buffer_bytes=20_000, interface="lo"
            )
        )
        for i, known in enumerate(two_sources())
    ]
    for publisher in publishers:
        publisher.connect()
    reports = sync(both, models[2], publishers, "broadcast")
    assert max(largest_difference(one.client, models[2]) for one in both) < 1e-5
    assert sum(report.num_tensors for report in reports) == len(models[2].state_dict())
    for publisher in publishers:
        publisher.close()


def test_all_transports_leave_the_same_bits(served, models, tmp_path):
    checksums = set()
    for transport in TRANSPORTS:
        publisher = make_publisher(options([served], transport, directory=tmp_path))
        sync([served], models[1], [publisher], transport, tmp_path)
        sync([served], models[2], [publisher], transport, tmp_path)
        checksums.add(str(served.client.weights_checksum()))
        publisher.close()
    assert len(checksums) == 1


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


def num_running(client) -> int:
    return sum(load["num_running_reqs"] for load in client._request("GET", "/v1/loads")["loads"])


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_running_requests_go_on_after_the_sync(served, models, mode):
    """A request that runs while weights change is neither ended nor begun anew.

    retract's later tokens come from the new weights alone.
    """
    client, version = served.client, served.version + 1
    length = 600
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            client.generate,
            prompt(1),
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
            return_logprob=True,
        )
        wait_until(
            lambda: None if num_running(client) else "it does not run",
            deadline_s=20,
            who="test",
            whom="the request",
            phase="start",
            interval_s=0.02,
        )
        publisher = make_publisher(options([served], "ipc"))
        update = EngineSide(order_of([client.endpoint], "ipc", version, pause_mode=mode))
        update.begin()
        publisher.send(models[2].state_dict().items(), version)
        assert not running.done()
        update.finish()
        served.version = version
        answer = running.result(timeout=60)
    publisher.close()
    tokens = answer["output_ids"]
    assert len(tokens) == length and answer["meta_info"]["finish_reason"]["type"] == "length"
    last = torch.tensor([item[0] for item in answer["meta_info"]["output_token_logprobs"][-5:]])
    new = hf_logprobs(models[2], prompt(1) + tokens)[-5:]
    difference = (last - new).abs().max().item()
    assert difference < 1e-5 if mode == "retract" else difference > 1e-5
    # What comes later uses none of it.
    client.flush_cache()
    assert largest_difference(client, models[2]) < 1e-5


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
