"""Leaving a cluster whose node process hangs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest

from slime_like.cluster import ray_session


@pytest.fixture
def at_exit(monkeypatch) -> list:
    handlers: list = []
    monkeypatch.setattr(ray_session, "atexit", SimpleNamespace(register=handlers.append))
    return handlers


def test_a_node_that_hangs_holds_up_nobody_and_is_killed_when_all_is_said(monkeypatch, at_exit, tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    node, other = subprocess.Popen([tmp_path / "raylet", "60"]), subprocess.Popen(["sleep", "60"])
    node.send_signal(signal.SIGSTOP)
    answered = threading.Event()
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: answered.wait())
    monkeypatch.setattr(ray_session, "_LEAVE_S", 0.05)
    try:
        ray_session.disconnect()
        (handler,) = at_exit
        handler()
        assert node.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        answered.set()
        for process in (node, other):
            process.kill()
            process.wait()


def test_a_node_that_answers_is_left_to_ray(monkeypatch, at_exit):
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    ray_session.disconnect()
    assert at_exit == []
