"""Digests inside the engine: what they cover, and what an absent or narrower parameter gives."""

from __future__ import annotations

import json

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from slime_like.weight_sync.in_engine.receipt import BUFFER, digest, read_digests, take, weighted_sum


def model():
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.randn(6, 4))
    module.stack = torch.nn.Parameter(torch.randn(3, 6, 4))
    module.register_buffer("bias", torch.randn(3))
    return module


def answers(module, *entries):
    take(module, json.dumps(entries).encode())
    whole = bytes(module.get_buffer(BUFFER).tolist())
    return [whole[i : i + 8] for i in range(0, len(whole), 8)]


def test_rows_columns_experts_and_buffers():
    module = model()
    rows, columns, expert, bias = answers(
        module,
        ["matrix", None, 0, 2, 3, "float32"],
        ["matrix", None, 1, 1, 2, "float32"],
        ["stack", 2, 0, 0, 6, "float32"],
        ["bias", None, 0, 0, 3, "float32"],
    )
    expected = [module.matrix[2:5], module.matrix[:, 1:3].contiguous(), module.stack[2], module.bias]
    assert [rows, columns, expert, bias] == [xxhash.xxh3_64_digest(t.detach().numpy().tobytes()) for t in expected]
    # a shorter answer replaces the longer one
    assert answers(module, ["matrix", None, 0, 0, 6, "float32"]) == [digest(module.matrix.detach())]


def test_what_the_model_does_not_have():
    absent = [
        ["other", None, 0, 0, 1, "float32"],
        ["matrix", None, 0, 4, 3, "float32"],
        ["stack", 3, 0, 0, 6, "float32"],
        ["bias", None, 1, 0, 1, "float32"],
    ]
    assert answers(model(), *absent) == [bytes(8)] * 4


def test_a_wider_parameter_is_compared_in_the_type_that_was_sent():
    sent = torch.randn(4).bfloat16()
    module = torch.nn.Module()
    module.router = torch.nn.Parameter(sent.float())
    assert answers(module, ["router", None, 0, 0, 4, "bfloat16"]) == [digest(sent)]


def summed(flat) -> bytes:
    return read_digests([weighted_sum(flat)])[0]


class HostReads(TorchDispatchMode):
    """Counts the values that the host asks a device for, one at a time."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*args, **kwargs or {})


def test_sums_stay_on_the_device_until_all_are_read_together():
    """Each read makes the host wait for all that the device was told before."""
    flats = [torch.full((number + 1,), number, dtype=torch.uint8) for number in range(200)]
    with HostReads() as reads:
        waiting = [weighted_sum(flat) for flat in flats]
        assert reads.count == 0 and {one.dim() for one in waiting} == {0}
        read = read_digests([b"12345678", *waiting, b"abcdefgh"])
        assert reads.count == 0  # they come as one tensor
    assert read[0] == b"12345678" and read[-1] == b"abcdefgh" and read[1:-1] == [summed(flat) for flat in flats]
    assert read_digests([]) == []


def test_weighted_sum_sees_values_places_and_single_bits():
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, 256, (4099,), dtype=torch.uint8, generator=generator)  # not a multiple of a word
    seen = {summed(flat)}
    for place in (0, 1, 2048, 4097, 4098):
        for bit in (1, 128):
            other = flat.clone()
            other[place] ^= bit
            seen.add(summed(other))
    exchanged = flat.clone()
    exchanged[:4], exchanged[4:8] = flat[4:8], flat[:4]
    seen.add(summed(exchanged))
    assert len(seen) == 12
    words = torch.nn.functional.pad(flat, (0, 1)).view(torch.int32).tolist()
    constant = 0x9E3779B97F4A7C15
    assert (
        int.from_bytes(summed(flat), "big")
        == sum(word * (place * constant * 2 + 1) for place, word in enumerate(words)) % 2**64
    )
