"""The hash that SGLang draws seeded samples with, on a CPU host."""

# Covers slime_like.sglang_backend.cpu_compat too.

import struct

import torch

from slime_like.sglang_backend.cpu_compat import murmur_hash32

MASK = 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, byte by byte, as published (Appleby, public domain)."""
    value = 0
    for start in range(0, len(data) // 4 * 4, 4):
        (block,) = struct.unpack_from("<I", data, start)
        block = block * 0xCC9E2D51 & MASK
        block = (block << 15 | block >> 17) & MASK
        value ^= block * 0x1B873593 & MASK
        value = (value << 13 | value >> 19) & MASK
        value = value * 5 + 0xE6546B64 & MASK
    tail = int.from_bytes(data[len(data) // 4 * 4 :], "little")
    if tail:
        tail = tail * 0xCC9E2D51 & MASK
        tail = (tail << 15 | tail >> 17) & MASK
        value ^= tail * 0x1B873593 & MASK
    value ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 16


def test_the_published_function_by_its_known_values():
    assert murmur3(b"") == 0
    assert murmur3(b"hello") == 0x248BFA47
    assert murmur3(b"The quick brown fox jumps over the lazy dog") == 0x2E4FF723


def test_every_row_and_column_has_the_hash_of_its_sixteen_bytes():
    seeds = [0, 1, 2**31 - 1, 2**32 + 5, 2**63 - 1]
    positions, columns = [0, 7, 1023, 5, 1], [0, 1, 150_000]
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64), torch.tensor(positions), torch.tensor(columns, dtype=torch.int32)
    )
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected
