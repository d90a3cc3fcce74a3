"""Threads work on the device of whoever starts them."""

from __future__ import annotations

import threading

import pytest
import torch

from slime_like.weight_sync.device import on_this_device
from slime_like.weight_sync.together import run_together


@pytest.fixture
def chosen(monkeypatch) -> threading.local:
    """torch's device as CUDA keeps it: by thread, 0 until somebody chooses. This thread has chosen 3."""
    device = threading.local()
    device.index = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(device, "index", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(device, "index", index))
    return device


def test_a_thread_has_the_device_of_whoever_started_it(chosen):
    seen: dict[str, int] = {}

    def run(name: str) -> None:
        seen[name] = torch.cuda.current_device()

    for name, target in {"plain": run, "ours": on_this_device(run)}.items():
        thread = threading.Thread(target=target, args=(name,))
        thread.start()
        thread.join(10)
    assert seen == {"plain": 0, "ours": 3}


def test_tasks_that_run_together_have_it(chosen):
    tasks = {"a": torch.cuda.current_device, "b": lambda: torch.cuda.current_device()}
    assert run_together(tasks, timeout_s=10.0, who="test", phase="test") == {"a": 3, "b": 3}


def test_a_process_without_cuda_is_left_alone():
    assert not torch.cuda.is_initialized() and on_this_device(print) is print
