"""A tiny HTTP server whose answers a test writes down: path -> (status, JSON), or a function of the body that returns
that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from slime_like.utils.net import host_port


class FakeServer:
    """answers: path -> (status, JSON) or function(body) -> (status, JSON).

    calls: (method, path, body) in order of arrival.
    """

    def __init__(self, answers: dict, api_key: str | None = None):
        self.answers = answers
        self.api_key = api_key
        self.calls: list[tuple[str, str, dict | None]] = []
        self.url = ""

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.calls]


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def serve(
    answers: dict, api_key: str | None = None, *, host: str = "127.0.0.1", certificate: Path | None = None
) -> Iterator[FakeServer]:
    """A FakeServer on a free port while the block runs; https with `certificate` (a PEM file with its key).

    Unknown paths are 404, a wrong key is 401.
    """
    fake = FakeServer(answers, api_key)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.split("?")[0]
            fake.calls.append((self.command, path, body))
            if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
                status, answer = 401, {"error": "Unauthorized"}
            else:
                answer_or_function = fake.answers.get(path, (404, {"detail": "Not Found"}))
                status, answer = answer_or_function(body) if callable(answer_or_function) else answer_or_function
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_DELETE = do_POST

        def log_message(self, *args):
            """Quiet."""

    server = _Server6((host, 0), Handler) if ":" in host else ThreadingHTTPServer((host, 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"{'https' if certificate else 'http'}://{host_port(host, server.server_address[1])}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
