"""Keeps a copy of the weights beside an engine and applies deltas to it: runs on the engine's host, needs neither torch
nor SGLang.

    python -m slime_like.weight_sync.delta.receiver --directory /local/weights --host 10.0.0.5 --port 20500
    --api-key-file key.txt

    GET  /state     {"version": 6, "folder": ..., "sources": {"0": digest}}
    POST /begin     {"version": 7}                                             the driver, once
    POST /shard     a frame (frame.py)                                         the trainer's sources
    POST /finish    {"version", "source", "num_sources", "num_shards", "digest"}
    POST /commit    {"version": 7} -> {"folder": ...}                    the driver; the engine then loads this folder

Every request needs `Authorization: Bearer <key>`; nothing is read of one that has not. Refusals are JSON, {"error":
...}: 401 the key, 409 not in step, 413 too large, 422 damaged (naming the tensor and both digests), 507 the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import logging
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slime_like.errors import WeightSyncError
from slime_like.utils.logs import LOG_LEVELS, start_logging
from slime_like.utils.net import host_port
from slime_like.weight_sync.delta.codec import DeltaError
from slime_like.weight_sync.delta.store import NotInStepError, VersionStore

logger = logging.getLogger("slime_like.weight_sync.delta.receiver")  # as a program, __name__ would be "__main__"

MIN_KEY_CHARS = 16
_MAX_JSON_BYTES = 64 << 10
#: What is read of a body at a time.
_READ_BYTES = 1 << 20
#: How long a connection may be silent, in seconds.
_SILENCE_S = 60.0
#: How long what a refused request still sends is thrown away, in seconds.
_LINGER_S = 2.0


class _Refusal(Exception):
    def __init__(self, status: int, message: str):
        self.status, self.message = status, message
        super().__init__(message)


class ReceiverServer(ThreadingHTTPServer):
    """Serves one VersionStore."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], store: VersionStore, *, api_key: str, max_bytes: int):
        self.store, self.api_key, self.max_bytes = store, api_key, max_bytes
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_S
    server: ReceiverServer

    def do_GET(self) -> None:
        self._serve({"/state": lambda: self.server.store.state()})

    def do_POST(self) -> None:
        self._serve({"/begin": self._begin, "/shard": self._shard, "/finish": self._finish, "/commit": self._commit})

    def _serve(self, routes: dict) -> None:
        try:
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(key.encode(errors="surrogateescape"), self.server.api_key.encode()):
                raise _Refusal(401, "the key is wrong")
            if self.path not in routes:
                raise _Refusal(404, f"{self.command} {self.path} is not known")
            self._answer(200, routes[self.path]())
        except _Refusal as refusal:
            self._answer(refusal.status, {"error": refusal.message}, close=True)
        except NotInStepError as error:
            self._answer(409, {"error": str(error)})
        except DeltaError as error:
            self._answer(422, {"error": str(error)})
        except TimeoutError:
            self._answer(408, {"error": f"nothing came for {_SILENCE_S:.0f} s"}, close=True)
        except OSError as error:
            logger.warning("%s %s: %s", self.command, self.path, error)
            self._answer(507, {"error": f"{type(error).__name__}: {error}"}, close=True)

    def _begin(self) -> dict:
        (version,) = self._json(version=int)
        self.server.store.begin(version)
        return {}

    def _shard(self) -> dict:
        self.server.store.apply(self._body(self.server.max_bytes))
        return {}

    def _finish(self) -> dict:
        version, source, num_sources, num_shards, expected = self._json(
            version=int, source=int, num_sources=int, num_shards=int, digest=str
        )
        self.server.store.finish(version, source, num_sources=num_sources, num_shards=num_shards, expected=expected)
        return {}

    def _commit(self) -> dict:
        (version,) = self._json(version=int)
        done = self.server.store.commit(version)
        logger.info("version %d is complete: %s", version, done.folder)
        return {"folder": done.folder}

    def _json(self, **fields: type) -> list[Any]:
        """The values of a JSON object with exactly these fields; integers are not negative."""
        try:
            data = json.loads(bytes(self._body(_MAX_JSON_BYTES)))
        except (ValueError, RecursionError):
            raise _Refusal(400, "the request is no JSON") from None
        if not isinstance(data, dict) or data.keys() != fields.keys():
            raise _Refusal(400, f"the request must have the fields {', '.join(fields)}")
        for name, kind in fields.items():
            if type(data[name]) is not kind or (kind is int and data[name] < 0):
                raise _Refusal(400, f"{name} must be {'a whole number of at least 0' if kind is int else 'a text'}")
        return [data[name] for name in fields]

    def _body(self, limit: int) -> bytearray:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19) or self.headers.get("Transfer-Encoding"):
            raise _Refusal(411, "a request must tell its Content-Length")
        if int(length) > limit:
            raise _Refusal(413, f"{int(length)} bytes, at most {limit} are taken (--max-bytes)")
        body = bytearray()  # grows with what comes, not to what the request claims
        while len(body) < int(length):
            part = self.rfile.read(min(_READ_BYTES, int(length) - len(body)))
            if not part:
                raise _Refusal(400, f"the request ended after {len(body)} of {int(length)} bytes")
            body += part
        return body

    def _answer(self, status: int, data: dict, *, close: bool = False) -> None:
        body = json.dumps(data).encode()
        try:
            self.send_response(status)
            if close:  # its body may not have been read
                self.close_connection = True
                self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if close:
                self._linger()
        except OSError as error:
            logger.warning("%s went away before it was answered: %s", self.address_string(), error)
            self.close_connection = True

    def _linger(self) -> None:
        """Throw away what is still being sent, for a moment: closing at once would reset the connection before the
        answer is read.
        """
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _LINGER_S
        self.connection.settimeout(_LINGER_S)
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < deadline and self.connection.recv(1 << 16):
                pass

    def log_message(self, format: str, *args: object) -> None:
        logger.info("%s %s", self.address_string(), format % args)


def read_key(path: str) -> str:
    """The key in a file. Raises WeightSyncError if it can be read by others or is too short to be one."""
    try:
        with open(path, encoding="utf-8") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise WeightSyncError(f"--api-key-file {path}: {error.strerror}.") from None
    if mode & 0o077:
        raise WeightSyncError(f"--api-key-file {path}: other users can read it. Fix: chmod 600 {path}.")
    if len(key) < MIN_KEY_CHARS:
        raise WeightSyncError(
            f"--api-key-file {path}: a key of {len(key)} characters. Fix: at least {MIN_KEY_CHARS}, such as of: openssl"
            " rand -hex 24."
        )
    return key


def main(argv: list[str] | None = None) -> int:
    """Serve until ended; 2 for a command line or folder that cannot be used."""
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
    parser.add_argument("--port", type=int, required=True, help="Port to listen at; 0: a free one, which is printed.")
    parser.add_argument(
        "--api-key-file", required=True, help="File with the key that trainers must send, readable by its owner only."
    )
    parser.add_argument(
        "--max-bytes", type=int, default=16 << 30, help="Largest request, and largest file made of one."
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="Least level of what is logged; info names every request.",
    )
    options = parser.parse_args(argv)
    start_logging(options.log_level, line_format="%(asctime)s %(levelname)s %(message)s")
    try:
        key = read_key(options.api_key_file)
        store = VersionStore(options.directory, max_shard_bytes=options.max_bytes)
        server = ReceiverServer((options.host, options.port), store, api_key=key, max_bytes=options.max_bytes)
    except (WeightSyncError, OSError, OverflowError) as error:
        print(f"receiver: {error}", file=sys.stderr)
        return 2
    held = store.state()["version"]
    print(
        f"receiver at {host_port(options.host, server.server_port)} holds"
        f" {'nothing' if held is None else f'version {held}'}",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
