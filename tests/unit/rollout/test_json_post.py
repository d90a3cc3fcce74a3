"""POST over kept connections, against a server that says byte by byte what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from slime_like.rollout.json_post import JsonPoster

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request with the next of `answers`, then as the last; None hangs. An answer that ends in "!" closes
    the connection.
    """

    def __init__(self, *answers: bytes | None):
        self.answers, self.requests, self.connections, self.ended = answers, [], 0, 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/generate"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
                self.requests.append(head + await reader.readexactly(length))
                if answer is None:
                    continue
                for piece in answer.removesuffix(b"!").split(b"|"):
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                if answer.endswith(b"!"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            writer.close()


def run(work: Callable[[Server, JsonPoster], Awaitable], *answers: bytes | None):
    """What `work` gives, within ten seconds."""

    async def main():
        poster = JsonPoster()
        async with Server(*answers) as server, asyncio.timeout(10):
            try:
                return await work(server, poster)
            finally:
                await poster.close()

    return asyncio.run(main())


def ask(*answers: bytes | None, times: int = 1):
    """(what each of `times` requests one after the other gave, the connections that they took)."""

    async def work(server: Server, poster: JsonPoster):
        return [await poster.post(server.url, b"{}", {}) for _ in range(times)], server.connections

    return run(work, *answers)


def test_what_is_sent():
    async def work(server: Server, poster: JsonPoster):
        await poster.post(server.url + "?a=b c", b'{"x": 1}', {"Authorization": "Bearer k"})
        return server.requests[0], server.url.removeprefix("http://").removesuffix("/generate")

    request, host = run(work, GOOD)
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == b'{"x": 1}' and head.decode().split("\r\n") == [
        "POST /generate?a=b%20c HTTP/1.1",
        f"Host: {host}",
        "Accept: */*",
        "Content-Type: application/json",
        "Authorization: Bearer k",
        "Content-Length: 8",
    ]


def test_connections_are_used_again_and_as_many_as_are_needed():
    assert ask(GOOD, times=5) == ([(b"ok", 200)] * 5, 1)

    async def work(server: Server, poster: JsonPoster):
        for _ in range(2):
            assert await asyncio.gather(*(poster.post(server.url, b"{}", {}) for _ in range(4))) == [(b"ok", 200)] * 4
        return server.connections

    assert run(work, GOOD) == 4


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Len|gth: 5\r\n\r\nhe|llo", (b"hello", 200)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel|\r\n2\r\nlo\r\n0\r\n\r\n", (b"hello", 200)),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", (b"busy", 503)),
        (b"HTTP/1.1 307 Elsewhere\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", (b"", 307)),
        (b"HTTP/1.1 100 Continue\r\n\r\n|HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", (b"ok", 200)),
        (b"HTTP/1.1 204 Nothing\r\n\r\n", (b"", 204)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000, (b"x" * 5_000_000, 200)),
    ],
)
def test_answers_however_they_are_framed(answer: bytes, expected):
    assert ask(answer, GOOD, times=2) == ([expected, (b"ok", 200)], 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok!",  # a server that goes without a word
        b"HTTP/1.0 200 OK\r\n\r\no|k!",  # the end of the connection is the end of the answer
    ],
)
def test_a_connection_that_the_server_closes_is_not_used_again(answer: bytes):
    async def work(server: Server, poster: JsonPoster):
        first = await poster.post(server.url, b"{}", {})
        await asyncio.sleep(0.05)
        return first, await poster.post(server.url, b"{}", {}), server.connections

    assert run(work, answer, GOOD) == ((b"ok", 200), (b"ok", 200), 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel!",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_half_an_answer_is_an_error_and_the_next_request_has_a_connection_of_its_own(answer: bytes):
    async def work(server: Server, poster: JsonPoster):
        with pytest.raises(aiohttp.ClientError):
            await poster.post(server.url, b"{}", {})
        return await poster.post(server.url, b"{}", {}), server.connections

    assert run(work, answer, GOOD) == ((b"ok", 200), 2)


def test_an_answer_that_nobody_asked_for_is_given_to_nobody():
    async def work(server: Server, poster: JsonPoster):
        await poster.post(server.url, b"{}", {})
        await asyncio.sleep(0.05)
        return await poster.post(server.url, b"{}", {}), server.connections

    assert run(work, GOOD + b"|HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", GOOD) == ((b"ok", 200), 2)


def test_who_is_cancelled_closes_the_connection():
    async def work(server: Server, poster: JsonPoster):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(poster.post(server.url, b"{}", {}), 0.1)
        await asyncio.sleep(0.05)
        return server.ended, await poster.post(server.url, b"{}", {})

    assert run(work, None, GOOD) == (1, (b"ok", 200))


def test_nobody_listens():
    async def work(server: Server, poster: JsonPoster):
        with pytest.raises(OSError, match="Cannot connect to 127.0.0.1:1"):
            await poster.post("http://127.0.0.1:1/generate", b"{}", {})

    run(work, GOOD)


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://host/x", {}),
        ("http:///x", {}),
        ("http://user@host/x", {}),
        ("http://host/x", {"x-key": "a\r\nContent-Length: 0"}),
        ("http://host/x", {"x-key": "a\nb"}),
        ("http://host/x\nb", {}),
    ],
)
def test_what_cannot_be_sent_is_refused(url: str, headers: dict[str, str]):
    async def work(_: Server, poster: JsonPoster):
        with pytest.raises(ValueError, match="line break|no http"):
            await poster.post(url, b"{}", headers)

    run(work, GOOD)
