"""A reward server for --rm-type remote_rm: python tests/e2e/chaos/reward_server.py PORT FILE.

The reward is the share of characters with an even number. As long as FILE is there, the answer is no JSON.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Reward(BaseHTTPRequestHandler):
    """One question, one number."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """The answer."""
        response = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["response"]
        reward = sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))
        body = b"<html>Bad Gateway" if os.path.exists(sys.argv[2]) else json.dumps(reward).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Reward).serve_forever()
