"""Do one thing per engine at the same time, with one deadline for all. No torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slime_like.errors import WaitTimeout
from slime_like.weight_sync.device import on_this_device

#: How often the watch is asked.
_WATCH_S = 1.0


def run_together(
    tasks: Mapping[str, Callable[[], Any]],
    *,
    timeout_s: float,
    who: str,
    phase: str,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Run every task in a thread of its own; name -> result.

    Raises the first failure at once, without waiting for the others, or WaitTimeout naming those that are late. Such
    threads are left behind: a broadcast that waits for a dead engine ends only at its own deadline. watch: asked each
    second; what it raises ends the wait.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()

    def run(name: str, task: Callable[[], Any]) -> None:
        try:
            done.put((name, task(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below, whatever it is
            done.put((name, None, error))

    for name, task in tasks.items():
        threading.Thread(target=on_this_device(run), args=(name, task), name=f"{phase}: {name}", daemon=True).start()
    results: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(tasks):
        try:
            left = max(0.0, deadline - time.monotonic())
            name, result, error = done.get(timeout=min(left, _WATCH_S) if watch is not None else left)
        except queue.Empty:
            if watch is not None and time.monotonic() < deadline:
                watch()
                continue
            late = ", ".join(name for name in tasks if name not in results)
            heard = ", ".join(results) or "nobody"
            raise WaitTimeout(who=who, whom=late, phase=phase, seconds=timeout_s, last=f"done: {heard}") from None
        if error is not None:
            raise error
        results[name] = result
    return results
