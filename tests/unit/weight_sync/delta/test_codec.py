"""Deltas lose nothing, whatever the bits; what was damaged is refused."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from slime_like.weight_sync.delta import codec as delta_codec
from slime_like.weight_sync.delta.codec import CHUNK_ELEMENTS, OVERWRITE, WHOLE, XOR, DeltaError, decode, encode

NOTHING = np.zeros(0, np.uint8)


def packed(new: np.ndarray, old: np.ndarray | None, itemsize: int, encoding: str) -> tuple[bytearray, int]:
    into = bytearray()
    return into, encode(new, old, itemsize=itemsize, encoding=encoding, into=into)


def unpacked(
    data: bytes | bytearray, old: np.ndarray | None, num_bytes: int, itemsize: int, encoding: str
) -> np.ndarray:
    return np.concatenate(
        [NOTHING, *decode(memoryview(data), old, num_bytes=num_bytes, itemsize=itemsize, encoding=encoding)]
    )


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def with_changes(old: np.ndarray, itemsize: int, share: float, seed: int) -> np.ndarray:
    """A copy in which about `share` of the elements have other bits."""
    generator = np.random.default_rng(seed)
    new = old.copy().reshape(-1, itemsize)
    chosen = generator.random(len(new)) < share
    new[chosen, generator.integers(0, itemsize)] ^= generator.integers(1, 256, int(chosen.sum()), dtype=np.uint8)
    return new.reshape(-1)


@pytest.mark.parametrize(("itemsize", "encoding"), itertools.product((1, 2, 4, 8), (XOR, OVERWRITE, WHOLE)))
def test_any_bits_come_back(itemsize, encoding):
    for number, (elements, share) in enumerate(
        itertools.product((0, 1, 7, 5000, 40_000), (0.0, 0.001, 0.05, 0.49, 0.51, 1.0))
    ):
        old = random_bytes(elements * itemsize, number)
        new = with_changes(old, itemsize, share, number)
        data, changed = packed(new, old, itemsize, encoding)
        assert unpacked(data, old, len(new), itemsize, encoding).tobytes() == new.tobytes()
        differ = int((old.reshape(-1, itemsize) != new.reshape(-1, itemsize)).any(axis=1).sum())
        assert changed == (elements if encoding == WHOLE else differ)


def test_nan_payloads_negative_zero_and_denormals_come_back():
    old = np.array([0x7FC00001, 0x80000000, 0x00000001, 0xFF800000, 0x7F800001], "<u4").view(np.uint8)
    new = np.array([0xFFC00002, 0x00000000, 0x80000001, 0x7F800000, 0x7F800001], "<u4").view(np.uint8)
    for encoding in (XOR, OVERWRITE):
        data, changed = packed(new, old, 4, encoding)
        assert changed == 4, "comparing floats would call -0.0 and 0.0 equal, and a nan unequal to itself"
        assert unpacked(data, old, 20, 4, encoding).tobytes() == new.tobytes()


def test_chunks_and_wide_gaps_come_back():
    """Changes on both sides of a chunk's end, gaps that need one, two and four bytes."""
    old = random_bytes((2 * CHUNK_ELEMENTS + 3) * 2, 1)
    new = old.copy()
    for element in (
        0,
        200,
        40_000,
        CHUNK_ELEMENTS - 1,
        CHUNK_ELEMENTS,
        CHUNK_ELEMENTS + 300_000,
        2 * CHUNK_ELEMENTS + 2,
    ):
        new[2 * element] ^= 0xFF
    data, changed = packed(new, old, 2, XOR)
    assert changed == 7
    assert unpacked(data, old, len(new), 2, XOR).tobytes() == new.tobytes()
    assert len(data) < 200, "seven changed elements among two million"


def test_nothing_changed_is_next_to_nothing():
    old = random_bytes(4000, 2)
    data, changed = packed(old, old, 2, XOR)
    assert changed == 0 and len(data) == 13


def test_small_steps_take_less_than_they_would_plainly():
    """bf16 weights of which 3 % move by one unit in the last place: fewer bytes than zstd makes of the difference."""
    import zstandard

    generator = np.random.default_rng(0)
    old = (generator.standard_normal(1 << 18).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old + (generator.random(len(old)) < 0.03).astype("<u2")
    data, _ = packed(new.view(np.uint8), old.view(np.uint8), 2, XOR)
    plain = len(zstandard.ZstdCompressor(level=3).compress((old ^ new).tobytes()))
    assert len(data) < plain
    entropy_bits = -(0.03 * np.log2(0.03) + 0.97 * np.log2(0.97))  # of which elements changed, per element
    # A carry goes one bit further half of the time: 2 bits of entropy a change.
    assert len(data) * 8 < len(old) * (entropy_bits + 0.03 * 2) * 1.12


def test_damaged_chunks_are_refused_and_never_grow():
    old = random_bytes(2000, 3)
    data, _ = packed(with_changes(old, 2, 0.1, 3), old, 2, XOR)
    large, _ = packed(random_bytes(40_000, 4), None, 2, WHOLE)  # its planes are apart
    for broken in (large[:-1], large + b"\0", large[:13] + struct.pack("<I", 1 << 31) + large[17:]):
        with pytest.raises(DeltaError):
            unpacked(broken, None, 40_000, 2, WHOLE)
    for broken in (
        data[:-1],
        data[:5],
        data + b"\0",
        struct.pack("<IBII", 5, 3, 0, 0) + data[13:],
        struct.pack("<IBII", 1 << 30, 1, 0, 0) + data[13:],
    ):
        with pytest.raises(DeltaError):
            unpacked(broken, old, 2000, 2, XOR)
    with pytest.raises(DeltaError):
        unpacked(data, old[:-2], 2000, 2, XOR)


def test_a_bomb_is_not_unpacked():
    """Compressed data that tells a size of its own, or holds more than the tensor, is refused before memory is taken
    for it.
    """
    import zstandard

    zeros = bytes(1 << 26)
    for says_its_size in (True, False):
        bomb = zstandard.ZstdCompressor(write_content_size=says_its_size).compress(zeros)
        data = delta_codec._CHUNK.pack(100, 0, 0, len(bomb)) + bomb
        with pytest.raises(DeltaError):
            unpacked(data, None, 200, 2, WHOLE)
