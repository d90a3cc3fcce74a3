"""A request's JSON in pieces, made while it is sent: what takes megabytes is never in memory as text."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import orjson

#: Of one piece; a multiple of three, so that base64 of pieces is base64 of the whole. httpcore copies, after each write
#: to the socket, all that is left of a piece.
_PIECE_BYTES = 3 << 18


class Body:
    """The JSON of an object; or of one with a list of equal strings, which are base64 of a payload.

    Example: Body({"a": 1}, "b", b"xyz", copies=2) is {"a":1,"b":["eHl6","eHl6"]}.
    """

    def __init__(self, fields: dict, name: str | None = None, payload: bytes = b"", *, copies: int = 0):
        self._head, self._tail, self._payload, self._copies = orjson.dumps(fields), b"", payload, copies
        if name is not None:
            opening = b"{" if not fields else self._head[:-1] + b","
            self._head, self._tail = opening + orjson.dumps(name) + b":[", b"]}"

    def __len__(self) -> int:
        """Bytes."""
        text = 2 + 4 * -(-len(self._payload) // 3)
        return len(self._head) + len(self._tail) + self._copies * text + max(0, self._copies - 1)

    def __iter__(self) -> Iterator[bytes]:
        yield from _pieces(self._head)
        for number in range(self._copies):
            yield b'"' if number == 0 else b',"'
            yield from map(base64.b64encode, _pieces(self._payload))
            yield b'"'
        if self._tail:
            yield self._tail


def _pieces(whole: bytes) -> Iterator[bytes]:
    if len(whole) <= _PIECE_BYTES:
        yield whole
        return
    view = memoryview(whole)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])
