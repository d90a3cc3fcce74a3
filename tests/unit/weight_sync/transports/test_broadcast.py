"""Broadcast to engines of two processes and of one: what arrives, and how much memory it takes."""
# Covers slime_like.weight_sync.in_engine.groups too, which it does not import itself.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import xxhash
from weight_sync.alive_bytes import Alive
from weight_sync.broadcasts import BUCKET, assert_all_hold, publisher, ranks_of, two_publishers, weights

#: Behind the tensors of a bucket.
TABLE = 4096
LOAD, LOAD_NATIVE = "/update_weights_from_tensor", "/update_weights_from_distributed"


pytestmark = pytest.mark.slow  # engines of several processes


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
