"""Broadcast to engines of two processes and of one: what arrives, how much memory it takes, and what happens when
somebody fails.
"""
# Covers slime_like.weight_sync.in_engine.groups too, which it does not import itself.

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import xxhash
from weight_sync.alive_bytes import Alive
from weight_sync.fake_engines import FakeEngine, Nest, bits

from slime_like.errors import SlimeLikeError, WeightSyncError
from slime_like.weight_sync.transports.broadcast import BroadcastPublisher
from slime_like.weight_sync.transports.registry import PublisherOptions
from slime_like.weight_sync.transports.sources import Sources

#: Bytes of --update-weight-buffer-size, of which a slot is half.
BUCKET = 400_000
#: Behind the tensors of a bucket.
TABLE = 4096
DEADLINE_S = 30.0
#: What ends by itself ends in a second or two; this leaves a loaded host room and is far from the deadline.
SOON_S = DEADLINE_S / 2
LOAD, LOAD_NATIVE = "/update_weights_from_tensor", "/update_weights_from_distributed"


pytestmark = pytest.mark.slow  # engines of several processes


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    nest = Nest(2, 1)
    yield nest
    nest.close()


def publisher(
    engines: Iterable[FakeEngine],
    source: int = 0,
    sources: Sources | None = None,
    buffer_bytes: int = BUCKET,
    timeout_s: float = DEADLINE_S,
) -> BroadcastPublisher:
    endpoints = tuple(engine.endpoint for engine in engines)
    options = PublisherOptions(
        "broadcast",
        endpoints,
        source,
        1 if sources is None else 2,
        buffer_bytes,
        timeout_s,
        None,
        "127.0.0.1",
        sources=sources,
    )
    connected = BroadcastPublisher(options)
    connected.connect()
    return connected


def two_publishers(engines: list[FakeEngine], timeout_s: float = DEADLINE_S) -> list[BroadcastPublisher]:
    host = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=timeout_s)
    other = Sources("127.0.0.1", host.port, is_host=False, who="trainer source 1", timeout_s=timeout_s)
    return [publisher(engines, number, sources, timeout_s=timeout_s) for number, sources in enumerate((host, other))]


def weights(count: int, seed: int = 0, elements: int = 40_000) -> list[tuple[str, torch.Tensor]]:
    """By default each has 160 kB, and is a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"t{number}", torch.randn(elements, generator=generator)) for number in range(count)]


def ranks_of(engines: Iterable[FakeEngine]) -> list[dict]:
    return [rank for engine in engines for rank in engine.report()["ranks"]]


def assert_all_hold(engines: Iterable[FakeEngine], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    expected = {name: bits(tensor) for name, tensor in tensors}
    for rank in ranks_of(engines):
        assert rank["held"] == expected


class RowsProof:
    """Asks rank r of an engine for row r of every tensor, which is known to be in float32."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]], tp_sizes: list[int]):
        self.tensors, self.tp_sizes, self.heard_digests = dict(tensors), tp_sizes, {}

    def layout_number(self, engine: int) -> int | None:
        return engine

    def entries(self, names: Iterable[str]) -> list:
        return [
            [[[name, None, 0, rank, 1, "float32"] for name in names] for rank in range(tp_size)]
            for tp_size in self.tp_sizes
        ]

    def heard(self, engine: int, rank: int, digest: str) -> None:
        self.heard_digests[engine, rank] = digest

    def expected(self, rank: int) -> str:
        parts = b"".join(xxhash.xxh3_64_digest(tensor[rank].numpy()) for tensor in self.tensors.values())
        return hashlib.blake2b(parts, digest_size=8).hexdigest()


# What arrives


def test_every_type_and_shape_arrives_at_every_rank_in_one_request_for_a_sync(nest):
    engines = nest.engines()
    flat = torch.arange(-300, 300)
    dtypes = [
        "float32",
        "bfloat16",
        "float16",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int64",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    tensors = [(dtype, flat.to(getattr(torch, dtype))) for dtype in dtypes]
    tensors += [
        ("matrix", torch.randn(7, 5)),
        ("transposed", torch.randn(7, 5).t()),
        ("strided", torch.randn(30)[::3]),
        ("scalar", torch.tensor(1.5)),
    ]
    tensors += [
        ("empty", torch.zeros(0, 3)),
        ("layers.0.experts.1.w", torch.randn(2, 3, 4).bfloat16()),
        ("nan", torch.tensor([float("nan"), -0.0])),
    ]
    sender = publisher(engines, buffer_bytes=4000)
    for version in (1, 2):
        tensors[0] = ("float32", flat.float() * version)
        report = sender.send(iter(tensors), version)
        assert_all_hold(engines, tensors)
    assert report.num_tensors == 18 and report.num_bytes == sum(
        tensor.numel() * tensor.element_size() for _, tensor in tensors
    )
    assert all(engine.report()["calls"].count(LOAD) == 2 for engine in engines)
    sender.send(iter(()), 3)
    sender.close()


def listeners() -> set[tuple[str, int]]:
    """(address, port) of everything that this process listens at."""
    return {
        (at.laddr.ip, at.laddr.port)
        for at in psutil.Process().net_connections("tcp")
        if at.status == psutil.CONN_LISTEN
    }


def test_trainer_sources_listen_on_the_loopback_interface_only(nest):
    before = listeners()
    senders = two_publishers(nest.engines())
    ours = listeners() - before
    assert len(ours) >= 3, "the sources' store and one for each group, beside gloo's"
    assert {address for address, _ in ours} == {"127.0.0.1"}
    theirs = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert {address for address, _ in listeners() - before - ours} & {"::", "0.0.0.0"}, "this is what torch does"
    del theirs
    for sender in senders:
        sender.close()


def test_every_rank_digests_what_was_asked_of_it(nest):
    engines = nest.engines()
    tensors = [(f"t{number}", torch.randn(2, 20_000)) for number in range(5)]
    proof = RowsProof(tensors, [2, 1])
    sender = publisher(engines)
    # a model has its tensors from the start
    sender.send(((name, torch.zeros_like(tensor)) for name, tensor in tensors), 1)
    sender.send(iter(tensors), 2, proof)
    assert proof.heard_digests == {(0, 0): proof.expected(0), (0, 1): proof.expected(1), (1, 0): proof.expected(0)}
    sender.close()


# Memory


def test_no_more_than_two_buckets_are_alive_in_sender_and_engines(nest):
    engines = nest.engines()
    sender = publisher(engines)
    alive = Alive(sender._slots)
    # buckets that grow, so that engines take larger memory
    sizes = [120_000, 60_000, 150_000, 180_000, 20_000, 190_000, 10_000, 200_000] * 4
    for version in (1, 2):
        sender.send(alive.stream(sizes), version)
    sender.close()
    assert BUCKET < alive.most <= 2 * BUCKET
    for rank in ranks_of(engines):
        assert rank["most_blocks"] == 2  # one comes in while the other is loaded
        assert BUCKET // 2 < rank["most_bytes"] <= BUCKET + 2 * TABLE
        assert rank["bytes"] == 0 and rank["threads"] == []


def test_two_sources_share_the_two_buckets_of_an_engine(nest):
    engines = nest.engines(nap_s=0.002)
    senders = two_publishers(engines)
    streams = [Alive(sender._slots) for sender in senders]
    with ThreadPoolExecutor() as pool:
        sizes = [150_000, 180_000, 190_000, 200_000] * 5
        list(
            pool.map(
                lambda number: senders[number].send(
                    ((f"s{number}.{name}", tensor) for name, tensor in streams[number].stream(sizes)), 1
                ),
                range(2),
            )
        )
    for alive, sender in zip(streams, senders, strict=True):
        sender.close()
        assert alive.most <= 2 * BUCKET
    for rank in ranks_of(engines):
        assert len(rank["held"]) == 40
        assert rank["most_blocks"] == 4
        assert rank["most_bytes"] <= 2 * BUCKET + 4 * TABLE
        assert rank["bytes"] == 0
    assert [engine.report()["calls"].count(LOAD) for engine in engines] == [1, 1]


def test_after_a_tensor_larger_than_a_bucket_memory_is_given_back(nest):
    engines = nest.engines()
    sender = publisher(engines)
    sizes = [150_000] * 3 + [10 * BUCKET] * 2 + [150_000] * 8
    slots = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, size in enumerate(sizes):
            slots.append(sum(slot.memory.numel() for slot in sender._slots))
            yield f"t{number}", torch.full((size,), number, dtype=torch.uint8)

    sender.send(stream(), 1)
    sender.close()
    assert max(slots) >= 10 * BUCKET and slots[-1] <= BUCKET + 2 * TABLE
    for rank in ranks_of(engines):
        assert len(rank["held"]) == len(sizes)
        assert 10 * BUCKET <= rank["most_bytes"] <= 20 * BUCKET + 2 * TABLE
        assert rank["bytes_at"][-1] <= BUCKET + 2 * TABLE
        assert rank["bytes"] == 0


# Failures of the weights


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


# Failures of engines


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
        assert time.monotonic() - start < 4 * timeout_s
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


# Engines without our loader


def test_engines_without_our_loader_get_a_request_for_each_bucket_and_sources_take_turns(nest):
    engines = nest.engines(loaders=[])
    senders, tensors = two_publishers(engines), weights(12)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: senders[number].send(iter(tensors[number::2]), 1), range(2)))
    assert_all_hold(engines, tensors)
    assert [engine.report()["calls"].count(LOAD_NATIVE) for engine in engines] == [12, 12]
    assert all(LOAD not in engine.report()["calls"] for engine in engines)
    for sender in senders:
        sender.close()
