"""As little as an HTTP exchange can be in Python: the bound of rollout_driver.py."""

from __future__ import annotations

import asyncio


class BareConnection(asyncio.Protocol):
    """Answers of a known length, found by counting bytes."""

    def connection_made(self, transport) -> None:
        self.transport, self._pieces, self._missing = transport, [], None

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        self.transport.write(request)
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            head = data.index(b"\r\n\r\n")
            start = data.index(b"Content-Length: ") + len(b"Content-Length: ")
            self._missing, data = int(data[start : data.index(b"\r", start)]), data[head + 4 :]
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing == 0:
            pieces, self._pieces, self._missing = self._pieces, [], None
            self._answer.set_result(b"".join(pieces))
