"""POST requests of JSON over connections that are kept open: all that a rollout asks of engines, for a quarter of the
CPU of a general client.

A session of aiohttp spends more CPU on one exchange than everything else that the driver does with a sample
(benchmarks/rollout_driver.py): cookies, redirects, tracing, form data. None of it is needed here, and none of it is
done: an answer that redirects is an answer like any other. aiohttp's parser reads the answers.
"""

from __future__ import annotations

import asyncio
import collections
import ssl
import time
import urllib.parse
from collections.abc import Mapping

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpResponseParser, RawResponseMessage

from slime_like.sglang_backend.client import trusted_certificates
from slime_like.utils.net import certificates

#: How long an idle connection is used again: uvicorn closes them after five seconds.
_KEEP_S = 2.0
#: Beyond it the parser would wait for a reader: 100,000 tokens' routed experts are shorter.
_BUFFER_BYTES = 1 << 30


class JsonPoster:
    """Use it inside one running event loop; any number of requests at a time: the caller limits them, and how long they
    take.
    """

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[bytes, int]:
        """(the answer's body, its HTTP status). headers: beside those of any POST of JSON.

        Raises OSError if nobody listens, aiohttp.ClientError if the connection ends before the answer does or what
        comes is no HTTP, ValueError for a url or header that cannot be sent. A request that is cancelled closes its
        connection, from which an engine learns of it.
        """
        server = self._servers.get(url) or self._servers.setdefault(url, _Server(url))
        request = server.request(body, headers)
        connection = server.idle() or await server.connect()
        try:
            answer = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        server.keep(connection)
        return answer

    async def close(self) -> None:
        """Close the connections that are idle; one that is used is its request's."""
        for server in self._servers.values():
            server.close()
        await asyncio.sleep(0)  # the loop closes their sockets in its next turn


class _Server:
    """One url, and the connections to it that are idle, the one that was used last on the right."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or not url.isprintable():
            raise ValueError(f"{url!r} is no http(s) address without a user")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        target = urllib.parse.quote(
            (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe="/?&=%:,;+@~"
        )
        self._head = (
            f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\nContent-Type: application/json\r\n"
        )
        self._trust: ssl.SSLContext | None = None
        self._idle: collections.deque[_Connection] = collections.deque()

    def request(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The bytes of a request. Raises ValueError for a header that is more than a line."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError(f"of the headers {', '.join(headers)} one contains a line break")
        return f"{self._head}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def idle(self) -> _Connection | None:
        """A connection to use again; None if there is none."""
        oldest = time.monotonic() - _KEEP_S
        while self._idle and self._idle[0].last_used < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def connect(self) -> _Connection:
        """A new connection. Raises OSError naming the address."""
        loop = asyncio.get_running_loop()
        if self._secure and self._trust is None:
            self._trust = trusted_certificates(certificates())
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(loop), self._host, self._port, ssl=self._trust
            )
        except OSError as error:
            raise OSError(f"Cannot connect to {self._host}:{self._port}: {error}") from error
        return connection

    def keep(self, connection: _Connection) -> None:
        """It has answered: it is used again, if the server lets us."""
        if connection.usable:
            connection.last_used = time.monotonic()
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()


class _Connection(BaseProtocol):
    """One exchange at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        super().__init__(loop)
        self._parser = self._reader = HttpResponseParser(
            self, loop, _BUFFER_BYTES, payload_exception=aiohttp.ClientPayloadError, read_until_eof=True
        )
        self._exchange: asyncio.Future[tuple[bytes, int]] | None = None
        self._answer: tuple[RawResponseMessage, aiohttp.StreamReader] | None = None  # as far as it has come
        self._is_last = False  # the server closes it after this answer
        self.last_used = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self.transport is not None and not self._is_last and not self.transport.is_closing()

    async def exchange(self, request: bytes) -> tuple[bytes, int]:
        """(body, status) of the answer to the request; waits for the whole of it."""
        if self.transport is None:
            raise aiohttp.ServerDisconnectedError
        self._exchange = self._loop.create_future()
        self.transport.write(request)
        return await self._exchange

    def close(self) -> None:
        """At once."""
        self._is_last = True
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Of the event loop: a piece of an answer."""
        try:
            messages = self._reader.feed_data(data)[0]
        except Exception as error:  # noqa: BLE001 whatever the parser says is wrong, it is told to whoever waits
            return self._fail(aiohttp.ClientPayloadError(f"what came is no HTTP: {type(error).__name__}: {error}"))
        for message, payload in messages:
            if message.code >= 200:  # below: the server tells that it goes on
                self._answer = message, payload
        if self._exchange is None:
            if messages or data:
                self.close()  # nobody has asked for it
        elif self._answer is not None and self._answer[1].is_eof():
            self._settle(*self._answer)
        return None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Of the event loop: it is closed, by whom ever."""
        super().connection_lost(exc)
        if self._exchange is None:
            return
        try:
            self._reader.feed_eof()  # an answer may end so
        except Exception as error:  # noqa: BLE001 as above
            return self._fail(aiohttp.ClientPayloadError(f"the answer was cut off: {type(error).__name__}: {error}"))
        if self._answer is not None and self._answer[1].is_eof():
            return self._settle(*self._answer)
        return self._fail(exc if isinstance(exc, OSError) else aiohttp.ServerDisconnectedError())

    def _settle(self, message: RawResponseMessage, payload: aiohttp.StreamReader) -> None:
        exchange, self._exchange, self._answer = self._exchange, None, None
        self._is_last |= message.should_close
        if exchange is None or exchange.done():
            return
        try:
            exchange.set_result((payload.read_nowait(-1), message.code))
        except aiohttp.ClientError as error:  # of the payload, kept by its reader
            exchange.set_exception(error)

    def _fail(self, error: Exception) -> None:
        exchange, self._exchange = self._exchange, None
        self.close()
        if exchange is not None and not exchange.done():
            exchange.set_exception(error)
