"""Buckets and the digest."""

from __future__ import annotations

import torch
import xxhash

from slime_like.weight_sync.buckets import Cutter, Digest, buckets, content_digest, raw_bytes
from slime_like.weight_sync.in_engine import receipt


def named(*sizes: int) -> list:
    # 4 bytes an element
    return [(f"t{i}", torch.full((size,), i, dtype=torch.float32)) for i, size in enumerate(sizes)]


def names(tensors, max_bytes: int) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets(tensors, max_bytes)]


def test_buckets_are_filled_up_to_the_limit_in_order():
    assert names(named(2, 2, 1, 4), 16) == [["t0", "t1"], ["t2"], ["t3"]]
    assert names(named(1, 1, 1, 1), 16) == [["t0", "t1", "t2", "t3"]]


def test_only_a_tensor_that_is_larger_alone_exceeds_the_limit():
    assert names(named(1, 100, 1, 1), 16) == [["t0"], ["t1"], ["t2", "t3"]]


def test_what_is_not_copied_counts_for_a_quarter_and_moves_nothing():
    """What is copied begins at a multiple of its element's size of what was copied before, whatever lies between."""
    cutter, half, word = Cutter(64), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(8)
    assert [cutter.cuts_before("t", word, is_copied=False) for _ in range(9)] == [False] * 8 + [True]
    assert not cutter.cuts_before("t", half) and not cutter.cuts_before("t", half, is_copied=False)
    assert cutter.cuts_before("t", word), "2 bytes were copied, 4 are there"
    assert not cutter.cuts_before("t", word)


def test_nothing_gives_no_bucket_and_nothing_is_read_ahead():
    assert names([], 16) == []
    taken = []
    stream = (taken.append(name) or (name, tensor) for name, tensor in named(4, 4, 4))
    next(buckets(stream, 16))
    assert taken == ["t0", "t1"]


def test_raw_bytes_of_every_type_and_shape():
    assert raw_bytes(torch.tensor([1, 256], dtype=torch.int16)).tolist() == [1, 0, 0, 1]
    assert raw_bytes(torch.tensor(1.0, dtype=torch.bfloat16)).tolist() == [0x80, 0x3F]
    assert raw_bytes(torch.arange(4, dtype=torch.uint8).reshape(2, 2).t()).tolist() == [0, 2, 1, 3]
    assert raw_bytes(torch.zeros(0, 3)).tolist() == []


def test_experts_have_buckets_of_their_own():
    layer = "model.layers.0.mlp."
    tensors = [
        (layer + name, torch.zeros(1))
        for name in (
            "gate.weight",
            "experts.0.up_proj.weight",
            "experts.1.up_proj.weight",
            "shared_experts.up_proj.weight",
        )
    ]
    assert names(tensors, 100) == [
        [layer + "gate.weight"],
        [name for name, _ in tensors[1:3]],
        [layer + "shared_experts.up_proj.weight"],
    ]


def test_every_tensor_begins_at_a_multiple_of_its_element_size():
    odd, wide = ("odd", torch.zeros(3, dtype=torch.uint8)), ("wide", torch.zeros(1))
    assert names([odd, wide, odd, odd], 100) == [["odd"], ["wide", "odd", "odd"]]


def test_tensors_that_the_engine_joins_are_never_parted():
    attention = "model.layers.0.self_attn."
    tensors = [
        (attention + name + ".weight", torch.zeros(2))
        for name in ("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ]
    assert [len(bucket) for bucket in names(tensors, 8)] == [1, 3, 1]
    # without a compressed query there is nothing to wait for
    assert [len(bucket) for bucket in names(tensors[3:], 8)] == [1, 1]
    renamed = [
        ("model.layers.0.self_attn.q_a_proj.weight", torch.zeros(2)),
        *((f"model.layers.{i}.mlp.weight", torch.zeros(2)) for i in (1, 2)),
    ]
    assert [len(bucket) for bucket in names(renamed, 8)] == [1, 1, 1]  # what it waits for never comes


def digest(tensors) -> int:
    total = Digest()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.value


def test_digest_of_one_tensor_by_hand():
    tensor = torch.tensor([[1, 2]], dtype=torch.uint8)
    assert content_digest(tensor) == xxhash.xxh3_64_digest(b"\x01\x02")
    by_hand = xxhash.xxh3_64(b"w|uint8|[1, 2]|" + xxhash.xxh3_64_digest(b"\x01\x02")).intdigest()
    for content in (None, content_digest(tensor)):
        total = Digest()
        total.add("w", tensor, content)
        assert total.value == by_hand
        assert (total.report().num_tensors, total.report().num_bytes) == (1, 2)


def test_digest_ignores_order_and_adds_up_over_sources():
    tensors = named(1, 2, 3)
    assert digest(tensors) == digest(reversed(tensors)) == (digest(tensors[:1]) + digest(tensors[1:])) % 2**64


def test_digest_sees_name_type_shape_and_one_bit():
    base = [("w", torch.zeros(2, 2))]
    changed = torch.zeros(2, 2)
    changed.view(torch.int32)[0, 0] = 1
    others = [
        [("v", torch.zeros(2, 2))],
        [("w", torch.zeros(4))],
        [("w", torch.zeros(2, 2, dtype=torch.int32))],
        [("w", changed)],
    ]
    assert len({digest(tensors) for tensors in [base, *others]}) == 5


def test_digest_of_a_view_is_that_of_its_elements():
    whole = torch.arange(6.0).reshape(2, 3)
    assert digest([("w", whole.t())]) == digest([("w", whole.t().contiguous())])


def test_a_digest_leaves_the_tensors_memory_as_it_was():
    """A trainer gives the memory of its weights up between syncs; torch refuses that once numpy has been shown it."""
    tensor = torch.arange(5, dtype=torch.float32)
    content_digest(tensor)
    receipt.digest(tensor[1:3])  # as a rank proves its part
    assert tensor.untyped_storage().resizable()
    assert content_digest(tensor) == xxhash.xxh3_64_digest(tensor.numpy().tobytes())
    assert content_digest(torch.empty(0)) == xxhash.xxh3_64_digest(b"")
