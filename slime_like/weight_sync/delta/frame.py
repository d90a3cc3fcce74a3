"""One shard of one version on its way to a receiver: a binary header with the digest of every tensor, then each
tensor's bytes. No torch, no pickle.

    magic (8)  |  header, compressed and whole (4 + 4)  |  header  |  digests before and after (32 a tensor)  |
    payloads  |  digest of all that (16)

The header is JSON: the versions it leads from and to, its place, and [name, dtype, shape, encoding, payload bytes] of
every tensor. Dtypes are those of safetensors; a shard is a safetensors file at the receiver, its tensors in this order.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
import zstandard

from slime_like.weight_sync.delta.codec import ENCODINGS, SAME, DeltaError, encode

#: safetensors' name of a type -> bytes of an element.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
NO_DIGEST = bytes(16)
_MAGIC = b"SLDELTA1"
_SIZES = struct.Struct("<II")
_DIGEST_BYTES = 16
#: A header's limit, whole: 100 000 tensors of 300 bytes.
_MAX_HEADER_BYTES = 32 << 20
_MAX_NAME_CHARS = 512
#: Bytes, and values, that a header has at most for itself and for each tensor: names and 16 dimensions take less.
_MAX_BYTES_EACH, _MAX_VALUES_EACH = 8 << 10, 64
#: zstd's memory for unpacking a header; ours are packed with a window of 4 MiB.
_MAX_WINDOW_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class TensorKey:
    """What a tensor is, without its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class FrameTensor:
    """One tensor of a frame. before: digest of what it is applied to; NO_DIGEST where nothing is needed."""

    key: TensorKey
    encoding: str
    before: bytes
    after: bytes
    payload_bytes: int


@dataclasses.dataclass(frozen=True)
class FramePlace:
    """base: the version that xor, overwrite and same start from; None if no tensor does."""

    version: int
    base: int | None
    source: int
    shard: int


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame that was read; payloads are views of its bytes.

    damage: what is wrong with it as a whole, to be told after a better reason.
    """

    place: FramePlace
    entries: tuple[FrameTensor, ...]
    payloads: tuple[memoryview, ...]
    damage: str | None


@dataclasses.dataclass(frozen=True)
class Change:
    """One tensor to be sent. new, old: uint8 [bytes]; old only where the encoding needs it."""

    key: TensorKey
    encoding: str
    before: bytes
    after: bytes
    new: np.ndarray
    old: np.ndarray | None = None


def write_frame(place: FramePlace, changes: Iterable[Change]) -> tuple[bytearray, int]:
    """(the frame, how many elements changed). One tensor at a time is looked at; the frame alone is held."""
    payloads, entries, changed = bytearray(), [], 0
    for change in changes:
        start = len(payloads)
        if change.encoding != SAME:
            changed += encode(
                change.new, change.old, itemsize=ITEM_BYTES[change.key.dtype], encoding=change.encoding, into=payloads
            )
        entries.append(FrameTensor(change.key, change.encoding, change.before, change.after, len(payloads) - start))
    tensors = [
        [e.key.name, e.key.dtype, list(e.key.shape), ENCODINGS.index(e.encoding), e.payload_bytes] for e in entries
    ]
    text = json.dumps([place.version, place.base, place.source, place.shard, tensors], separators=(",", ":")).encode()
    packed = zstandard.ZstdCompressor(level=9, write_content_size=False).compress(text)
    head = _MAGIC + _SIZES.pack(len(packed), len(text)) + packed + b"".join(e.before + e.after for e in entries)
    payloads[:0] = head
    payloads += xxhash.xxh3_128_digest(payloads)
    return payloads, changed


def read_frame(data: bytes | bytearray) -> Frame:
    """The frame in `data`.

    Raises DeltaError if it is none; that some of its bytes are wrong is told by `damage` and by each tensor's digest.
    """
    view = memoryview(data)
    start = len(_MAGIC) + _SIZES.size
    if len(view) < start + _DIGEST_BYTES or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise DeltaError("it is no frame of a weight delta")
    actual, expected = xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES]), bytes(view[-_DIGEST_BYTES:])
    damage = None if actual == expected else f"its digest is {actual.hex()}, it must be {expected.hex()}"
    try:
        place, entries, at = _read_header(view, start)
    except DeltaError as error:
        raise DeltaError(f"{error}{'' if damage is None else f'; {damage}'}") from None
    payloads = []
    for entry in entries:
        payloads.append(view[at : at + entry.payload_bytes])
        at += entry.payload_bytes
    if at != len(view) - _DIGEST_BYTES:
        raise DeltaError(
            f"its tensors take {at} bytes, but {len(view) - _DIGEST_BYTES} are there"
            + ("" if damage is None else f"; {damage}")
        )
    return Frame(place, tuple(entries), tuple(payloads), damage)


def _read_header(view: memoryview, start: int) -> tuple[FramePlace, list[FrameTensor], int]:
    """(place, tensors, where payloads begin)."""
    packed_bytes, text_bytes = _SIZES.unpack_from(view, start - _SIZES.size)
    room = len(view) - _DIGEST_BYTES - start - packed_bytes
    # Each tensor has two digests behind the header: how many there can be is known by what has arrived.
    most = room // (2 * _DIGEST_BYTES) + 1
    if room < 0 or not 0 < text_bytes <= min(_MAX_HEADER_BYTES, most * _MAX_BYTES_EACH):
        raise DeltaError("its header is damaged")
    packed = view[start : start + packed_bytes]
    try:
        if zstandard.get_frame_parameters(packed).content_size != zstandard.CONTENTSIZE_UNKNOWN:
            raise DeltaError("its header is not of our making")
        text = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(
            packed, max_output_size=text_bytes
        )
        # A list of nothing takes 3 bytes here and 64 in memory: count before it is made.
        if text.count(b",") + text.count(b"[") > most * _MAX_VALUES_EACH:
            raise DeltaError(f"its header is damaged: it has values for more than {most - 1} tensors")
        version, base, source, shard, tensors = json.loads(text)
    except (zstandard.ZstdError, ValueError, TypeError, RecursionError) as error:
        raise DeltaError(f"its header is damaged ({type(error).__name__})") from None
    _check_integers([version, source, shard] + ([] if base is None else [base]))
    at = start + packed_bytes
    if not isinstance(tensors, list) or at + 2 * _DIGEST_BYTES * len(tensors) > len(view) - _DIGEST_BYTES:
        raise DeltaError("its header is damaged (tensors)")
    entries = []
    for values in tensors:
        before, after = bytes(view[at : at + _DIGEST_BYTES]), bytes(view[at + _DIGEST_BYTES : at + 2 * _DIGEST_BYTES])
        entries.append(_entry(values, before, after))
        at += 2 * _DIGEST_BYTES
    if len({entry.key.name for entry in entries}) != len(entries):
        raise DeltaError("a tensor is in it twice")
    return FramePlace(version, base, source, shard), entries, at


def _entry(values: Sequence, before: bytes, after: bytes) -> FrameTensor:
    if not isinstance(values, list) or len(values) != 5:
        raise DeltaError("its header is damaged (a tensor)")
    name, dtype, shape, encoding, payload_bytes = values
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _MAX_NAME_CHARS
        or not name.isprintable()
        or name == "__metadata__"
    ):
        raise DeltaError("its header is damaged (a tensor's name)")
    if dtype not in ITEM_BYTES or not isinstance(shape, list) or len(shape) > 16:
        raise DeltaError(f"{name}: type {dtype!r} or shape {shape!r} is not known")
    _check_integers([*shape, encoding, payload_bytes])
    if encoding >= len(ENCODINGS):
        raise DeltaError(f"{name}: encoding {encoding} is not known")
    return FrameTensor(TensorKey(name, dtype, tuple(shape)), ENCODINGS[encoding], before, after, payload_bytes)


def _check_integers(values: Sequence) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise DeltaError(f"its header is damaged ({value!r} is no count)")


def source_digest(shards: Iterable[tuple[int, Sequence[tuple[TensorKey, bytes]]]]) -> str:
    """What one source's share of a version is, as one number: over place, name, type, shape and digest of every tensor,
    in order.
    """
    hasher = xxhash.xxh3_128()
    for shard, tensors in shards:
        for key, after in tensors:
            hasher.update(f"{shard}|{key.name}|{key.dtype}|{list(key.shape)}|".encode() + after)
    return hasher.hexdigest()
