"""One thing per engine at the same time: the first failure, the late ones, and a watch that ends the wait."""

from __future__ import annotations

import threading
import time

import pytest

from slime_like.errors import EngineError, WaitTimeout
from slime_like.weight_sync.together import run_together


def test_results_by_name():
    assert run_together({"a": lambda: 1, "b": lambda: 2}, timeout_s=5, who="w", phase="p") == {"a": 1, "b": 2}


def test_late_ones_are_named():
    never = threading.Event()
    with pytest.raises(WaitTimeout, match="w waited 0 s for b during p. Last heard: done: a"):
        run_together({"a": lambda: 1, "b": never.wait}, timeout_s=0.2, who="w", phase="p")
    never.set()


@pytest.mark.slow
def test_a_watch_that_raises_ends_the_wait_long_before_the_deadline():
    never, asked = threading.Event(), []

    def watch():
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise EngineError("engine 1 is dead")

    with pytest.raises(EngineError, match="engine 1 is dead"):
        run_together({"a": never.wait}, timeout_s=60, who="w", phase="p", watch=watch)
    never.set()
    assert len(asked) == 2


@pytest.mark.slow
def test_a_quiet_watch_keeps_the_deadline():
    never = threading.Event()
    with pytest.raises(WaitTimeout):
        run_together({"a": never.wait}, timeout_s=1.5, who="w", phase="p", watch=lambda: None)
    never.set()
