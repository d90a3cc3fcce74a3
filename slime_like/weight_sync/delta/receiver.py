"""Keeps a copy of the weights beside an engine and applies deltas to it: runs on the engine's host, needs aiohttp, but
neither torch nor SGLang.

    python -m slime_like.weight_sync.delta.receiver --directory /local/weights --host 10.0.0.5 --port 20500
    --api-key-file key.txt

    GET  /state     {"version": 6, "folder": ..., "sources": {"0": digest}}
    POST /begin     {"version": 7}                                             the driver, once
    POST /shard     a frame (frame.py)                                         the trainer's sources
    POST /finish    {"version", "source", "num_sources", "num_shards", "digest"}
    POST /commit    {"version": 7} -> {"folder": ...}                    the driver; the engine then loads this folder

Every request needs `Authorization: Bearer <key>`; nothing is read of one that has not. Refusals are JSON, {"error":
...}: 401 the key, 408 silence, 409 not in step, 411 no length, 413 too large, 422 damaged (naming the tensor and both
digests), 507 the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import hmac
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from slime_like.config.bounds import bounded
from slime_like.errors import WeightSyncError
from slime_like.utils.files import keep_files_private, private_folder
from slime_like.utils.logs import LOG_LEVELS, start_logging
from slime_like.utils.net import host_port
from slime_like.weight_sync.delta.codec import DeltaError
from slime_like.weight_sync.delta.store import NotInStepError, VersionStore

logger = logging.getLogger("slime_like.weight_sync.delta.receiver")  # as a program, __name__ would be "__main__"

MIN_KEY_CHARS = 16
_MAX_JSON_BYTES = 64 << 10
#: How long a connection may be silent, in seconds: before, within and after a request.
_SILENCE_S = 60.0
#: How long what a refused request still sends is thrown away, in seconds: closing at once would reset the connection
#: before the answer is read.
_LINGER_S = 2.0
#: Shards that are received at a time, each in memory; others wait. More pipeline stages than runs have.
_MAX_SHARDS_AT_A_TIME = 64
#: Threads that hash and write. The store lets one write at a time.
_NUM_THREADS = 4


_T = TypeVar("_T")


class _Refusal(Exception):
    def __init__(self, status: int, message: str):
        self.status, self.message = status, message
        super().__init__(message)


class ReceiverServer:
    """Serves one VersionStore. Raises OSError or OverflowError if it cannot listen at the address.

    silence_s: how long a client may be silent, in seconds.
    """

    def __init__(
        self,
        address: tuple[str, int],
        store: VersionStore,
        *,
        api_key: str,
        max_bytes: int,
        silence_s: float = _SILENCE_S,
    ):
        self._store, self._api_key, self._max_bytes, self._silence_s = store, api_key.encode(), max_bytes, silence_s
        self._shards = asyncio.Semaphore(_MAX_SHARDS_AT_A_TIME)
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "receiver")
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        over_ipv6 = ":" in address[0]
        family = socket.AF_INET6 if over_ipv6 else socket.AF_INET
        self._listener = socket.create_server(address, family=family, dualstack_ipv6=over_ipv6)
        self.port: int = self._listener.getsockname()[1]

    def serve_forever(self) -> None:
        """Answer until `stop` is called or the process is interrupted."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """Let `serve_forever` end; from any thread, before or after it has begun."""
        if not self._stop.done():
            self._stop.set_result(None)

    def close(self) -> None:
        """Give the address back and wait for what is being written."""
        self._listener.close()
        self._threads.shutdown()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/state", self._state, allow_head=False)
        app.router.add_post("/begin", self._begin)
        app.router.add_post("/shard", self._shard)
        app.router.add_post("/finish", self._finish)
        app.router.add_post("/commit", self._commit)
        runner = web.AppRunner(
            app,
            access_log=logger,
            access_log_format='%a "%r" %s',
            auto_decompress=False,  # unpacked, a body would be larger than its Content-Length
            keepalive_timeout=self._silence_s,
            lingering_time=_LINGER_S,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._listener).start()
            await asyncio.wrap_future(self._stop)
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Asks for the key before anything else; every refusal is JSON."""
        try:
            shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(shown.encode(errors="surrogateescape"), self._api_key):
                raise _Refusal(401, "the key is wrong")
            return await handler(request)
        except _Refusal as refusal:
            return _refused(refusal.status, refusal.message, close=True)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            return _refused(404, f"{request.method} {request.path} is not known", close=True)
        except NotInStepError as error:
            return _refused(409, str(error))
        except DeltaError as error:
            return _refused(422, str(error))
        except OSError as error:
            logger.warning("%s %s: %s", request.method, request.path, error)
            return _refused(507, f"{type(error).__name__}: {error}", close=True)

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(await self._in_thread(self._store.state))

    async def _begin(self, request: web.Request) -> web.Response:
        (version,) = await self._json(request, version=int)
        await self._in_thread(self._store.begin, version)
        return web.json_response({})

    async def _shard(self, request: web.Request) -> web.Response:
        async with self._shards:
            await self._in_thread(self._store.apply, await self._body(request, self._max_bytes))
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        version, source, num_sources, num_shards, expected = await self._json(
            request, version=int, source=int, num_sources=int, num_shards=int, digest=str
        )
        await self._in_thread(
            lambda: self._store.finish(
                version, source, num_sources=num_sources, num_shards=num_shards, expected=expected
            )
        )
        return web.json_response({})

    async def _commit(self, request: web.Request) -> web.Response:
        (version,) = await self._json(request, version=int)
        done = await self._in_thread(self._store.commit, version)
        logger.info("version %d is complete: %s", version, done.folder)
        return web.json_response({"folder": done.folder})

    async def _in_thread(self, work: Callable[..., _T], *values: Any) -> _T:
        """What the store answers; it hashes and writes, and others are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *values)

    async def _json(self, request: web.Request, **fields: type) -> list[Any]:
        """The values of a JSON object with exactly these fields; integers are not negative."""
        try:
            data = json.loads(bytes(await self._body(request, _MAX_JSON_BYTES)))
        except (ValueError, RecursionError):
            raise _Refusal(400, "the request is no JSON") from None
        if not isinstance(data, dict) or data.keys() != fields.keys():
            raise _Refusal(400, f"the request must have the fields {', '.join(fields)}")
        for name, kind in fields.items():
            if type(data[name]) is not kind or (kind is int and data[name] < 0):
                raise _Refusal(400, f"{name} must be {'a whole number of at least 0' if kind is int else 'a text'}")
        return [data[name] for name in fields]

    async def _body(self, request: web.Request, limit: int) -> bytearray:
        length = request.content_length
        if length is None:
            raise _Refusal(411, "a request must tell its Content-Length")
        if length > limit:
            raise _Refusal(413, f"{length} bytes, at most {limit} are taken (--max-bytes)")
        body = bytearray()  # grows with what comes, not to what the request claims
        while len(body) < length:
            try:
                async with asyncio.timeout(self._silence_s):
                    part = await request.content.readany()
            except TimeoutError:
                raise _Refusal(408, f"nothing came for {self._silence_s:g} s") from None
            except (OSError, web.RequestPayloadError):  # the client has gone
                part = b""
            if not part:
                message = f"the request ended after {len(body)} of {length} bytes"
                logger.warning("%s %s: %s", request.method, request.path, message)
                raise _Refusal(400, message)
            body += part
        return body


def _refused(status: int, message: str, *, close: bool = False) -> web.Response:
    """close: no other request on this connection, since the body of this one may not have been read."""
    response = web.json_response({"error": message}, status=status)
    if close:
        response.force_close()
    return response


def read_key(path: str) -> str:
    """The key in a file. Raises WeightSyncError if it can be read by others or is too short to be one."""
    try:
        with open(path, encoding="utf-8") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise WeightSyncError(f"--api-key-file {path}: {error.strerror}.") from None
    if mode & 0o077:
        raise WeightSyncError(f"--api-key-file {path}: other users can read it. Fix: chmod 600 {path}.")
    if not (key.isascii() and key.isprintable()):
        raise WeightSyncError(f"--api-key-file {path}: a header takes no such key. Fix: one line of ASCII characters.")
    if len(key) < MIN_KEY_CHARS:
        raise WeightSyncError(
            f"--api-key-file {path}: a key of {len(key)} characters. Fix: at least {MIN_KEY_CHARS}, such as of: openssl"
            " rand -hex 24."
        )
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.weight_sync.delta.receiver",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--directory",
        required=True,
        help="Folder of the copy, of this receiver alone; holds two versions while one arrives.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen at.")
    parser.add_argument(
        "--port",
        type=bounded(int, least=0, most=65535),
        required=True,
        help="Port to listen at; 0: a free one, which is printed.",
    )
    parser.add_argument(
        "--api-key-file", required=True, help="File with the key that trainers must send, readable by its owner only."
    )
    parser.add_argument(
        "--max-bytes",
        type=bounded(int, least=1, most=2**60),
        default=16 << 30,
        help="Largest request, and largest file made of one.",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="Least level of what is logged; info names every request.",
    )
    parser.add_argument(
        "--share-directory",
        action="store_true",
        help="Let others read the copy, as your umask has it: an engine of theirs.",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until ended; 2 for a command line or folder that cannot be used."""
    options = _parser().parse_args(argv)
    keep_files_private(share=options.share_directory)
    start_logging(options.log_level, line_format="%(asctime)s %(levelname)s %(message)s")
    try:
        key = read_key(options.api_key_file)
        private_folder(options.directory, share=options.share_directory)
        store = VersionStore(options.directory, max_shard_bytes=options.max_bytes)
        server = ReceiverServer((options.host, options.port), store, api_key=key, max_bytes=options.max_bytes)
    except (WeightSyncError, OSError, OverflowError) as error:
        print(f"receiver: {error}", file=sys.stderr)
        return 2
    held = store.state()["version"]
    print(
        f"receiver at {host_port(options.host, server.port)} holds {'nothing' if held is None else f'version {held}'}",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
