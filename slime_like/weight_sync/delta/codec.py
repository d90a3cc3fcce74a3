"""What changed between two versions of a tensor, as few bytes: positions and values of changed elements, compressed.

Lossless, no torch.
A tensor is cut into chunks of 2**20 elements. Of each chunk travel

    changed elements, bytes of a gap, compressed bytes of gaps, compressed bytes of values      (a header of 13 bytes)
    gaps      how many elements lie between a changed one and the one before it; left out where every element is listed
    values    of the changed elements: xor with the old ones, or the new ones (overwrite)

Both as byte planes, all lowest bytes first: an optimizer's small steps change low bits, so that the high planes shrink
to nothing. From 2**14 elements on each plane is compressed by itself, after the number of its bytes: mixed with noise,
zeros take more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import xxhash
import zstandard

from slime_like.errors import WeightSyncError

#: How one tensor travels. same: not at all; xor and overwrite: its changed elements; whole: all of it, no earlier
#: version needed.
SAME, XOR, OVERWRITE, WHOLE = ENCODINGS = ("same", "xor", "overwrite", "whole")
#: Elements of a chunk: what is unpacked at a time.
CHUNK_ELEMENTS = 1 << 20
#: Above this share of changed elements all are listed: their positions would cost more than the zeros between them.
_DENSE_SHARE = 0.5
_CHUNK = struct.Struct("<IBII")
#: Of zstd. Measured on bf16 and fp32 steps: levels up to 9 take as many bytes, 19 takes 1 to 4 % less and a hundred
#: times as long.
_LEVEL = 1
_APART_ELEMENTS = 1 << 14
_PLANE = struct.Struct("<I")
_UNSIGNED: dict[int, np.dtype] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class DeltaError(WeightSyncError):
    """Bytes that are not what they must be; the message names the tensor and both digests."""


def digest(data: np.ndarray) -> bytes:
    """xxh3-128 of a tensor's bytes. data: uint8 [bytes]."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(data).data)


def encode(new: np.ndarray, old: np.ndarray | None, *, itemsize: int, encoding: str, into: bytearray) -> int:
    """Append what turns `old` into `new` to `into`; the number of changed elements (all, with the encoding whole).

    new, old: uint8 [bytes], of equal length; old is read only by xor and overwrite.
    """
    elements, before = _elements(new, itemsize), None if old is None or encoding == WHOLE else _elements(old, itemsize)
    if before is not None and len(before) != len(elements):
        raise ValueError(f"{len(before)} old elements, but {len(elements)} new ones")
    changed = 0
    compressor = zstandard.ZstdCompressor(
        level=_LEVEL, write_content_size=False, write_checksum=False, write_dict_id=False
    )
    for start in range(0, len(elements), CHUNK_ELEMENTS):
        part = elements[start : start + CHUNK_ELEMENTS]
        gaps, values, count = _difference(
            part, None if before is None else before[start : start + CHUNK_ELEMENTS], encoding
        )
        width = 0 if gaps is None else gaps.itemsize
        packed_gaps = b"" if gaps is None else _packed(gaps, compressor)
        packed_values = _packed(values, compressor) if len(values) else b""
        into += _CHUNK.pack(len(values), width, len(packed_gaps), len(packed_values)) + packed_gaps + packed_values
        changed += count
    return changed


def decode(
    data: memoryview, old: np.ndarray | None, *, num_bytes: int, itemsize: int, encoding: str
) -> Iterator[np.ndarray]:
    """The new bytes (uint8), chunk by chunk. old: uint8 [num_bytes], not needed by whole.

    Raises DeltaError if `data` cannot be that.
    """
    if num_bytes % itemsize or (encoding != WHOLE and (old is None or len(old) != num_bytes)):
        raise DeltaError(
            f"{num_bytes} bytes of elements of {itemsize} bytes, encoded as {encoding}, do not fit what they are"
            " applied to"
        )
    before = None if encoding == WHOLE or old is None else _elements(old, itemsize)
    total, at, position = num_bytes // itemsize, 0, 0
    while position < total:
        length = min(CHUNK_ELEMENTS, total - position)
        if at + _CHUNK.size > len(data):
            raise DeltaError(f"it ends within the chunk at element {position}")
        count, width, gap_bytes, value_bytes = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if (
            at + gap_bytes + value_bytes > len(data)
            or count > length
            or width not in (0, 1, 2, 4)
            or (width == 0 and (gap_bytes or count not in (0, length)))
        ):
            raise DeltaError(
                f"the chunk at element {position} is impossible: {count} of {length} elements, gaps of {width} bytes"
            )
        gaps = _unpacked(data[at : at + gap_bytes], count, width) if width else None
        values = _unpacked(data[at + gap_bytes : at + gap_bytes + value_bytes], count, itemsize)
        at += gap_bytes + value_bytes
        yield _applied(
            None if before is None else before[position : position + length], gaps, values, length, encoding
        ).view(np.uint8)
        position += length
    if at != len(data):
        raise DeltaError(f"{len(data) - at} bytes too many")


def _difference(new: np.ndarray, old: np.ndarray | None, encoding: str) -> tuple[np.ndarray | None, np.ndarray, int]:
    """(gaps or None where all are listed, values, how many changed) of one chunk."""
    if old is None:
        return None, new, len(new)
    difference = np.bitwise_xor(new, old)
    positions = np.flatnonzero(difference)
    values = difference if encoding == XOR else new
    if len(positions) == 0:
        return None, values[:0], 0
    if len(positions) > _DENSE_SHARE * len(new):
        return None, values, len(positions)
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max())
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    return gaps.astype(_UNSIGNED[width]), values[positions], len(positions)


def _applied(
    old: np.ndarray | None, gaps: np.ndarray | None, values: np.ndarray, length: int, encoding: str
) -> np.ndarray:
    if old is None:
        if len(values) != length:
            raise DeltaError(f"{len(values)} of {length} elements, and no earlier version of the others")
        return values
    new = np.array(old)  # a copy in memory: the old file stays as it is
    if gaps is None:
        if len(values):
            new = np.bitwise_xor(new, values) if encoding == XOR else values
        return new
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(positions) and positions[-1] >= length:
        raise DeltaError(f"element {positions[-1]} of a chunk of {length} was changed")
    if encoding == XOR:
        new[positions] ^= values
    else:
        new[positions] = values
    return new


def _elements(data: np.ndarray, itemsize: int) -> np.ndarray:
    if itemsize not in _UNSIGNED:
        raise ValueError(f"elements of {itemsize} bytes")
    return data.view(_UNSIGNED[itemsize])


def _packed(elements: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    """Compressed byte planes."""
    planes = np.ascontiguousarray(elements).view(np.uint8).reshape(-1, elements.itemsize).T
    if len(elements) < _APART_ELEMENTS:
        return compressor.compress(planes.tobytes())
    packed = [compressor.compress(plane.tobytes()) for plane in planes]
    return b"".join(_PLANE.pack(len(part)) + part for part in packed)


def _unpacked(data: memoryview, count: int, itemsize: int) -> np.ndarray:
    """[count] unsigned elements from compressed byte planes; never unpacks more than they take."""
    if count < _APART_ELEMENTS:
        planes = np.frombuffer(_plain(data, count * itemsize), np.uint8).reshape(itemsize, count)
        return np.ascontiguousarray(planes.T).view(_UNSIGNED[itemsize]).reshape(-1)
    elements, at = np.empty((count, itemsize), np.uint8), 0
    for place in range(itemsize):
        if at + _PLANE.size > len(data):
            raise DeltaError("its compressed data is cut short")
        (length,) = _PLANE.unpack_from(data, at)
        at += _PLANE.size
        elements[:, place] = np.frombuffer(_plain(data[at : at + length], count), np.uint8)
        at += length
    if at != len(data):
        raise DeltaError("its compressed data does not end where it should")
    return elements.view(_UNSIGNED[itemsize]).reshape(-1)


def _plain(data: memoryview, num_bytes: int) -> bytes:
    """Exactly `num_bytes` from one zstd frame."""
    if num_bytes == 0:
        if len(data):
            raise DeltaError("bytes of no element")
        return b""
    try:
        # A frame that tells its own size would be unpacked to that size, whatever max_output_size says.
        if zstandard.get_frame_parameters(data).content_size != zstandard.CONTENTSIZE_UNKNOWN:
            raise DeltaError("its compressed data is not of our making")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise DeltaError(f"its compressed data is damaged ({error})") from None
    if len(raw) != num_bytes:
        raise DeltaError(f"its compressed data has {len(raw)} instead of {num_bytes} bytes")
    return raw
