"""Puts objects into Ray's store with a deadline: a node process (raylet) that hangs, hangs whoever puts."""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray

from slime_like.errors import WaitTimeout


def put(value: Any, *, seconds: float, phase: str) -> ray.ObjectRef:
    """As ray.put. Raises WaitTimeout if the store has not taken it by then."""
    answers: queue.SimpleQueue[ray.ObjectRef | BaseException] = queue.SimpleQueue()

    def act() -> None:
        try:
            answers.put(ray.put(value))
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            answers.put(error)

    # ray.put has no deadline, and a signal does not end it: it waits in C++ for an answer on a socket.
    threading.Thread(target=act, name="ray.put", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise WaitTimeout(
            who="train.py",
            whom="Ray's node process on this machine, which holds the object store,",
            phase=phase,
            seconds=seconds,
            last="it took no object; it is stopped, or hangs",
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer
