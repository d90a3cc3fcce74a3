"""Broadcasts in which weights, a source or an engine fail: who is named, who goes on, and that the next one works."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from weight_sync.broadcasts import BUCKET, SOON_S, assert_all_hold, publisher, ranks_of, two_publishers, weights
from weight_sync.fake_engines import FakeEngine, Nest

from slime_like.errors import SlimeLikeError, WeightSyncError

pytestmark = pytest.mark.slow  # engines of several processes


# Of the weights


def test_what_one_rank_cannot_load_is_told_at_once_and_the_next_sync_works(nest):
    engines = nest.engines()
    engines[0].order(refuse="t7", only_rank=1)
    sender, tensors = publisher(engines), weights(12)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="engine 0.*, rank 1: RuntimeError: size mismatch for t7"):
        sender.send(iter(tensors), 1)
    assert time.monotonic() - start < SOON_S
    assert all(engine.is_alive() for engine in engines)
    assert set(engines[1].report()["ranks"][0]["held"]) == {name for name, _ in tensors}
    engines[0].order()
    sender.send(iter(tensors), 2)
    assert_all_hold(engines, tensors)
    sender.close()


def fails_after(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors
    raise RuntimeError("no memory")


def test_when_the_stream_fails_engines_hear_of_it_at_once_and_the_next_sync_works(nest):
    engines = nest.engines()
    sender, tensors = publisher(engines), weights(12)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory"):
        sender.send(fails_after(tensors[:6]), 1)
    # Asked for behind the request to load. The last bucket was not handed over.
    assert all(len(rank["held"]) == 5 for rank in ranks_of(engines))
    assert time.monotonic() - start < SOON_S
    sender.send(iter(tensors), 2)
    assert_all_hold(engines, tensors)
    sender.close()


def slowly(tensors: Iterable[tuple[str, torch.Tensor]], nap_s: float = 0.05) -> Iterator[tuple[str, torch.Tensor]]:
    for item in tensors:
        time.sleep(nap_s)
        yield item


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_source_fails_the_other_stops_and_the_next_sync_works(nest, failing):
    engines = nest.engines()
    senders, tensors, start = two_publishers(engines), weights(20), time.monotonic()
    with ThreadPoolExecutor() as pool:
        broken = pool.submit(senders[failing].send, fails_after(slowly(tensors[:2])), 1)
        other = pool.submit(senders[1 - failing].send, slowly(tensors[2:]), 1)
        with pytest.raises(RuntimeError, match="no memory"):
            broken.result(20)
        with pytest.raises(
            WeightSyncError,
            match=f"trainer source {1 - failing} stops: trainer source {failing}: RuntimeError: no memory",
        ):
            other.result(20)
        assert time.monotonic() - start < SOON_S
        for sender in senders:
            sender.connect()
        list(pool.map(lambda number: senders[number].send(iter(tensors[number::2]), 2), range(2)))
    assert_all_hold(engines, tensors)
    for sender in senders:
        sender.close()


# Of engines


def killing(engine: FakeEngine, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from slowly(tensors[:6], 0.01)
    engine.kill()
    yield from slowly(tensors[6:], 0.01)


def assert_others_go_on(nest: Nest, engines: list[FakeEngine], killed: int) -> None:
    """The other engine is free again, and weights come to it and to the dead one's successor."""
    other, tensors = engines[1 - killed], weights(4, seed=1)
    assert other.is_alive()
    start = time.monotonic()
    other.report()
    assert time.monotonic() - start < SOON_S
    engines = nest.engines()
    assert engines[1 - killed].pids == other.pids
    sender = publisher(engines)
    sender.send(iter(tensors), 3)
    assert_all_hold(engines, tensors)
    sender.close()


def assert_names(error: BaseException, engines: list[FakeEngine], killed: int) -> None:
    """The error is about this engine, and not about all that could be late."""
    assert f"engine {killed}" in str(error) and engines[killed].endpoint.url in str(error)
    assert engines[1 - killed].endpoint.url not in str(error)


def test_an_engine_that_is_killed_ends_both_sources(nest):
    engines, timeout_s = nest.engines(), 2.5
    senders, tensors, start = two_publishers(engines, timeout_s), weights(40), time.monotonic()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(senders[0].send, slowly(tensors[::2]), 1)
        second = pool.submit(senders[1].send, killing(engines[1], tensors[1::2]), 1)
        for sent in (first, second):
            with pytest.raises(SlimeLikeError) as raised:
                sent.result(30)
            assert_names(raised.value, engines, 1)
    for sender in senders:
        sender.close()
    assert_others_go_on(nest, engines, 1)
    # of threads that wait in gloo, until their deadline; none is left of earlier tests
    while any(rank["bytes"] for rank in ranks_of(engines[:1])):
        assert time.monotonic() - start < 30  # their deadline is 2.5 s; the rest is a busy host's
        time.sleep(0.1)


@pytest.mark.parametrize("killed", [0, 1])
def test_an_engine_that_is_killed_is_named_and_the_other_one_is_set_free(nest, killed):
    engines = nest.engines()
    sender, start = publisher(engines), time.monotonic()
    with pytest.raises(SlimeLikeError) as raised:
        sender.send(killing(engines[killed], weights(40)), 1)
    assert_names(raised.value, engines, killed)
    assert time.monotonic() - start < SOON_S
    sender.close()
    assert_others_go_on(nest, engines, killed)


def test_an_engine_that_dies_at_the_very_end_does_not_take_the_other_one_along(nest):
    engines, tensors = nest.engines(), weights(6)
    engines[1].order(die_at="t5", nap_s=0.1)  # when the others have nothing left to receive
    sender, start = publisher(engines), time.monotonic()
    with pytest.raises(SlimeLikeError) as raised:
        sender.send(iter(tensors), 1)
    assert_names(raised.value, engines, 1)
    assert time.monotonic() - start < SOON_S
    sender.close()
    assert_others_go_on(nest, engines, 1)


def test_an_engine_without_room_for_a_tensor_says_so(nest):
    engines = nest.engines()
    engines[0].order(room=10 * BUCKET, only_rank=1)
    sender, tensors, start = publisher(engines), weights(6), time.monotonic()
    with pytest.raises(SlimeLikeError, match="engine 0, rank 1: RuntimeError: no room for"):
        sender.send(iter([*tensors[:4], ("large", torch.zeros(11 * BUCKET, dtype=torch.uint8)), *tensors[4:]]), 1)
    assert time.monotonic() - start < SOON_S
    pids = [engine.pids for engine in engines]
    assert [engine.pids for engine in nest.engines()] == pids
    sender.send(iter(tensors), 2)
    assert_all_hold(engines, tensors)
    sender.close()
