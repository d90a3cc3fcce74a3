"""The receiver as a program: what it refuses to start with, and that it ends with whoever started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.delta.frame import source_digest
from slime_like.weight_sync.delta.receiver import main, read_key
from slime_like.weight_sync.delta.receiver_client import ReceiverClient, ReceiverError, start_receiver


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
    ):
        with pytest.raises(WeightSyncError, match=message):
            read_key(key_file(tmp_path, text, mode))
    with pytest.raises(WeightSyncError, match="No such file"):
        read_key(str(tmp_path / "none"))


def test_a_command_line_that_cannot_be_used_ends_with_2(tmp_path, capsys):
    arguments = ["--directory", str(tmp_path / "copy"), "--port", "0", "--api-key-file", key_file(tmp_path, "short")]
    assert main(arguments) == 2
    assert "5 characters" in capsys.readouterr().err
    assert main([*arguments[:2], "--port", "99999", "--api-key-file", key_file(tmp_path, "a" * 16)]) == 2


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


def memory_bytes(pid: int) -> int:
    """VmHWM: the most that a process has had in memory."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_a_number_takes_no_memory(tmp_path):
    """Neither one in /finish nor the length that a request claims: an own process, whose memory can be looked at."""
    running = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "log"), timeout_s=20)
    try:
        client = ReceiverClient(running.url, running.key, 20.0)
        client.begin(1)
        before = memory_bytes(running.pid)
        for numbers in ({"num_sources": 1, "num_shards": 10**9}, {"num_sources": 10**9, "num_shards": 0}):
            with pytest.raises(ReceiverError) as refused:
                client.finish(1, 0, **numbers, digest=source_digest([]))
            assert refused.value.status == 422
        with socket.create_connection(
            (urlsplit(running.url).hostname, urlsplit(running.url).port), timeout=10
        ) as claimed:
            head = (
                f"POST /shard HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\nContent-Length:"
                f" {4 << 30}\r\n\r\n"
            )
            claimed.sendall(head.encode() + b"x" * 1000)
            claimed.shutdown(socket.SHUT_WR)
            assert b"ended after 1000 of" in b"".join(iter(lambda: claimed.recv(4096), b"")), (
                "head and body may come in two parts"
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
