"""How much of a stranger's body is read: bytes after decompression, and how many things they would become."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import zstandard

from slime_like.tinker.errors import Refused

#: A window that a decoder keeps for a body; zstd's own tools refuse larger ones too unless asked.
_MAX_WINDOW_BYTES = 128 * 2**20
_DATA, _CONFIG, _CONFIG_V2 = 3, 5, 7  # fields of ForwardBackwardRequest
_MAX_SETTINGS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Of one request. A client sends 1024 datums or 5 MB at once unless it is asked to send more."""

    body_bytes: int = 64 * 2**20  # as sent, and after decompression
    json_bytes: int = 16 * 2**20  # of a body that is not a pass: a prompt of a million tokens has half of it
    datums: int = 4096
    parts: int = 256  # chunks of text and arrays of one datum
    values: int = 2**25  # of all arrays, as they are after decoding
    targets_per_token: int = 1024
    prompt_tokens: int = 2**20
    num_samples: int = 1024
    stop_sequences: int = 64
    text_characters: int = 4096  # of a name, path or message


class ValueBudget:
    """Counts the values of one request's arrays, before memory is taken for them."""

    def __init__(self, limit: int):
        self._limit, self._taken = limit, 0

    def take(self, count: int) -> None:
        """Raises Refused once there are more than the limit."""
        self._taken += count
        if self._taken > self._limit:
            raise Refused(f"the arrays of this request have more than {self._limit} values", status=413)


def inflate(body: bytes, encoding: str | None, limit: int) -> bytes:
    """The body as it was before its Content-Encoding. Raises Refused: larger than `limit`, or no such thing."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise Refused(f"Content-Encoding {encoding[:40]!r} is not read here; zstd is, or none", status=415)
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decoder.stream_reader(body, read_across_frames=True) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"the body is no zstd: {error}", status=400) from None
    if len(plain) > limit:
        raise Refused(f"the body is longer than {limit} bytes when decompressed", status=413)
    return plain


def check_counts(body: bytes, limits: BodyLimits) -> None:
    """Refuse a ForwardBackwardRequest of too many messages, before it is parsed: an empty one costs its sender two
    bytes and us a hundred.
    """
    datums = settings = 0
    for number, start, end in _fields(body, 0, len(body)):
        if number == _DATA:
            datums += 1
            if datums > limits.datums:
                raise Refused(f"more than {limits.datums} datums in one request", status=413)
            for parts, _ in enumerate(_fields(body, start, end), 1):
                if parts > limits.parts:
                    raise Refused(f"datum {datums - 1} has more than {limits.parts} parts", status=413)
        elif number in (_CONFIG, _CONFIG_V2):
            settings += 1
            if settings > _MAX_SETTINGS:
                raise Refused(f"more than {_MAX_SETTINGS} numbers of a loss", status=413)


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, where its value starts, where it ends) of each field between two places of a protobuf message."""
    while at < end:
        tag, at = _varint(body, at, end)
        kind = tag & 7
        start = at
        if kind == 0:
            _, at = _varint(body, at, end)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            length, start = _varint(body, at, end)
            at = start + length
        else:
            raise Refused(f"the body is no protobuf message: a field of kind {kind}", status=400)
        if at > end:
            raise Refused("the body ends within a field", status=400)
        yield tag >> 3, start, at


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """(the number, where the next byte is)."""
    value = 0
    for place in range(10):
        if at + place >= end:
            raise Refused("the body ends within a number", status=400)
        byte = body[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise Refused("the body has a number of more than 10 bytes", status=400)
