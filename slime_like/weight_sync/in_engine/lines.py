"""Lines of JSON over a socket, several of which may have come at once.

Imports nothing heavy: the engine uses it too.
"""

from __future__ import annotations

import json
import socket

#: Bytes of one line, at most.
_MOST = 1 << 26


class Lines:
    """One end of a connection on which each message is a line."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._read = bytearray()

    @property
    def has_one(self) -> bool:
        """Whether a whole line is here already: select() knows only of what was not read yet."""
        return b"\n" in self._read

    def hear(self) -> dict | None:
        """The next message; None if the other end let go. Raises OSError (a timeout, say), ValueError."""
        while not self.has_one:
            if len(self._read) > _MOST:
                raise ValueError(f"a line of more than {_MOST} bytes")
            if not (part := self.socket.recv(1 << 16)):
                return None
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def say(self, message: dict) -> None:
        """Send one. Raises OSError."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")
