"""What a process did to its pretended device, in order: one list for streams, memory, groups and what a test adds."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import threading

_INSTALLED = "/site-packages/"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
#: This folder's files that stand between a program and its device.
_OWN = {os.path.join(_FOLDER, f"{name}.py") for name in ("collectives", "cuda", "device", "ipc", "record", "streams")}


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing done. Example: Event("empty_cache", {}, "slime_like/megatron_backend/worker.py:120", "MainThread")."""

    kind: str
    detail: dict
    where: str  # file:line, from the package's folder on
    thread: str


class Record:
    """Events in order, and counts of host reads by the line that made them.

    reads: the host waited for a value of the device. uploads: pageable host memory was copied to the device, for which
    the host waits too, but not for what the device computes.
    """

    #: Which of the host's cards is this process's device 0; other cards' IPC handles cannot be opened.
    card = "0"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reads: collections.Counter[str] = collections.Counter()
        self.uploads: collections.Counter[str] = collections.Counter()

    def note(self, kind: str, /, **detail) -> Event:
        """Add an event; detail: plain values, so that it can be sent to another process."""
        event = Event(kind, detail, caller(), threading.current_thread().name)
        self.events.append(event)
        return event

    def read(self, what: str) -> None:
        """Count a host read at the line that is being run. Example of a key: "…/packing.py:12 item"."""
        self.reads[f"{caller()} {what}"] += 1

    def upload(self) -> None:
        """Count a copy of pageable host memory to the device."""
        self.uploads[caller()] += 1

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def clear(self) -> None:
        """Forget everything: what follows is counted from 0."""
        self.events.clear()
        self.reads.clear()
        self.uploads.clear()


#: This process's.
RECORD = Record()


def caller() -> str:
    """file:line of the innermost frame that is neither torch's nor ours nor of the standard library; "autograd" where
    there is none, which is a backward of torch's own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _counts(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def _counts(name: str) -> bool:
    if name in _OWN or name.startswith("<"):
        return False
    if _INSTALLED in name:
        return not name.rpartition(_INSTALLED)[2].startswith("torch/")
    return "/lib/python3" not in name


def _short(name: str) -> str:
    for root in (_INSTALLED, "/slime_like/", "/tests/"):
        if root in name:
            tail = name.rpartition(root)[2]
            return tail if root == _INSTALLED else root.strip("/") + "/" + tail
    return name
