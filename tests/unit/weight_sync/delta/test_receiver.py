"""The receiver as a program: what it refuses to start with, and that it ends with whoever started it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from slime_like.errors import WeightSyncError
from slime_like.utils.net import wait_until
from slime_like.weight_sync.delta.frame import source_digest
from slime_like.weight_sync.delta.receiver import ReceiverServer, main, read_key
from slime_like.weight_sync.delta.receiver_client import ReceiverClient, ReceiverError, start_receiver
from slime_like.weight_sync.delta.store import VersionStore

KEY = "0123456789abcdef0123"


def key_file(tmp_path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_that_others_know_or_guess_is_refused(tmp_path):
    assert read_key(key_file(tmp_path, "a" * 16 + "\n")) == "a" * 16
    for text, mode, message in (
        ("a" * 15, 0o600, "15 characters"),
        ("a" * 16, 0o644, "chmod 600"),
        ("", 0o600, "0 characters"),
        ("é" * 16, 0o600, "ASCII"),
        ("a" * 16 + "\n" + "b" * 16, 0o600, "one line"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            read_key(key_file(tmp_path, text, mode))
    with pytest.raises(WeightSyncError, match="No such file"):
        read_key(str(tmp_path / "none"))


def test_a_command_line_that_cannot_be_used_ends_with_2(tmp_path, capsys):
    arguments = ["--directory", str(tmp_path / "copy"), "--port", "0", "--api-key-file", key_file(tmp_path, "short")]
    mask = os.umask(0o022)
    try:
        assert main(arguments) == 2
    finally:
        assert os.umask(mask) == 0o077, "what it writes is its own"
    assert "5 characters" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*arguments[:2], "--port", "99999", "--api-key-file", key_file(tmp_path, "a" * 16)])
    assert end.value.code == 2


def test_a_started_receiver_answers_and_ends(tmp_path):
    running = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "log"), timeout_s=20)
    try:
        client = ReceiverClient(running.url, running.key, 5.0)
        assert client.state().version is None
        with open(f"/proc/{running.pid}/cmdline", "rb") as file:
            assert running.key.encode() not in file.read()
        with pytest.raises(ReceiverError, match="used by another receiver"):
            start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "log-2"), timeout_s=20)
        running.check()
    finally:
        running.close()
    assert not os.path.exists(f"/proc/{running.pid}")
    with pytest.raises(ReceiverError, match="ended with status"):
        running.check()
    with pytest.raises(ReceiverError, match="failed"):
        client.state()


@pytest.mark.parametrize(("level", "logged"), [({}, True), ({"log_level": "error"}, False)], ids=["default", "error"])
def test_log_level(tmp_path, level, logged):
    running = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "log"), timeout_s=20, **level)
    try:
        ReceiverClient(running.url, running.key, 5.0).state()
    finally:
        running.close()
    assert ('"GET /state HTTP' in (tmp_path / "log").read_text()) is logged


def connection(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def head(key: str | None, *lines: str, path: str = "/shard") -> bytes:
    shown = [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *shown, *lines, "", ""]).encode()


def everything(client: socket.socket) -> bytes:
    """What comes until the receiver closes the connection."""
    return b"".join(iter(lambda: client.recv(4096), b""))


@contextlib.contextmanager
def served(tmp_path, silence_s: float) -> Iterator[str]:
    """The address of a receiver in a thread of this process."""
    store = VersionStore(str(tmp_path / "copy"), max_shard_bytes=1 << 20)
    server = ReceiverServer(("127.0.0.1", 0), store, api_key=KEY, max_bytes=1 << 20, silence_s=silence_s)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join(timeout=10)
        server.close()
        store.close()


def test_a_silent_client_is_not_waited_for(tmp_path):
    with served(tmp_path, silence_s=0.3) as url:
        started = time.monotonic()
        for sent, answer in (
            (b"", b""),
            (b"POST /shard HTTP/1.1\r\nHost:", b""),
            (head(KEY, "Content-Length: 100") + b"x", b"HTTP/1.1 408"),
        ):
            with connection(url) as client:
                client.sendall(sent)
                got = everything(client)
                assert got.startswith(answer) and (answer or not got)
        assert time.monotonic() - started < 8, "what a refused request might still send is not waited for long, either"


def test_a_refusal_comes_before_the_body(tmp_path):
    """Nothing of it is sent here; each answer is JSON and the last on its connection."""
    with served(tmp_path, silence_s=20.0) as url:
        claims = f"Content-Length: {1 << 20}"
        for sent, status, reason in (
            (head(None, claims), 401, "the key is wrong"),
            (head("x" + KEY, claims), 401, "the key is wrong"),
            (head(None, claims, path="/nowhere"), 401, "the key is wrong"),
            (head(KEY, claims, path="/nowhere"), 404, "POST /nowhere is not known"),
            (head(KEY, claims, path="/state"), 404, "POST /state is not known"),
            (head(KEY, f"Content-Length: {(1 << 20) + 1}"), 413, "1048577 bytes, at most 1048576"),
            (head(KEY, claims, path="/begin"), 413, "1048576 bytes, at most 65536"),
            (head(KEY), 411, "Content-Length"),
            (head(KEY, "Transfer-Encoding: chunked"), 411, "Content-Length"),
        ):
            with connection(url) as client:
                client.sendall(sent)
                answer = http.client.HTTPResponse(client)
                answer.begin()
                assert (answer.status, answer.will_close) == (status, True)
                assert answer.headers.get_content_type() == "application/json"
                assert reason in json.loads(answer.read())["error"]


def test_a_body_is_not_unpacked(tmp_path):
    """What it takes in memory is its Content-Length."""
    packed = gzip.compress(b'{"version": 1}' + b" " * 10_000)
    with served(tmp_path, silence_s=20.0) as url, connection(url) as client:
        client.sendall(head(KEY, "Content-Encoding: gzip", f"Content-Length: {len(packed)}", path="/begin") + packed)
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_shards_wait_for_their_turn(tmp_path):
    with served(tmp_path, silence_s=20.0) as url, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connection(url)) for _ in range(64)]
        for client in slow:
            client.sendall(head(KEY, "Content-Length: 100") + b"x" * 99)
        assert ReceiverClient(url, KEY, 5.0).state().version is None, "only shards wait"
        with connection(url) as last:
            last.sendall(head(KEY, "Content-Length: 100", "Connection: close") + b"x" * 100)
            last.settimeout(0.5)
            with pytest.raises(TimeoutError):
                last.recv(1)
            slow[0].sendall(b"x")
            last.settimeout(10)
            assert everything(last).startswith(b"HTTP/1.1 422 ")


def memory_bytes(pid: int) -> int:
    """VmHWM: the most that a process has had in memory."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_a_number_takes_no_memory(tmp_path):
    """Neither one in /finish nor the length that a request claims: an own process, whose memory can be looked at."""
    log = tmp_path / "log"
    running = start_receiver(str(tmp_path / "copy"), log_path=str(log), timeout_s=20)
    try:
        client = ReceiverClient(running.url, running.key, 20.0)
        client.begin(1)
        before = memory_bytes(running.pid)
        for numbers in ({"num_sources": 1, "num_shards": 10**9}, {"num_sources": 10**9, "num_shards": 0}):
            with pytest.raises(ReceiverError) as refused:
                client.finish(1, 0, **numbers, digest=source_digest([]))
            assert refused.value.status == 422
        with connection(running.url) as claimed:
            claimed.sendall(head(running.key, f"Content-Length: {4 << 30}") + b"x" * 1000)
            assert client.state().version is None, "others are served meanwhile"
        wait_until(
            lambda: None if "ended after 1000 of 4294967296 bytes" in log.read_text() else log.read_text(),
            deadline_s=10,
            who="test",
            whom="receiver",
            phase="notice that the client has gone",
        )
        assert memory_bytes(running.pid) - before < 16 << 20
        running.check()
    finally:
        running.close()


def test_it_needs_neither_torch_nor_sglang():
    code = (
        "import sys, slime_like.weight_sync.delta.receiver; print([name for name in ('torch', 'sglang', 'ray',"
        " 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
