"""Streams and events that order nothing, because everything is done at once, and say what they were asked."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from tests.pretend_gpu.record import RECORD

_numbers = itertools.count(1)
_thread = threading.local()


def synchronized(what: str) -> None:
    """The host waited until all that was asked of a stream, an event or the device was done."""
    RECORD.read("synchronize")
    RECORD.note("synchronize", of=what)


class Stream:
    """torch.cuda.Stream. `name`: "default", or its number by when it was made."""

    device_index, device_type, cuda_stream = 0, 2, 0

    def __init__(self, *_, name: str | None = None, **__):
        self.name = name or f"stream {next(_numbers)}"

    def wait_stream(self, other: Stream) -> None:
        RECORD.note("wait_stream", stream=self.name, on=other.name)

    def wait_event(self, event: Event) -> None:
        RECORD.note("wait_event", stream=self.name, on=event.name)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        synchronized(self.name)

    def query(self) -> bool:
        return True

    @property
    def device(self):
        import torch

        return torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        return f"<pretended {self.name}>"


class Event:
    """torch.cuda.Event."""

    def __init__(self, *_, **__):
        self.name = f"event {next(_numbers)}"
        self.recorded_on: str | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded_on = (stream or current()).name
        RECORD.note("record_event", event=self.name, stream=self.recorded_on)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        synchronized(self.name)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0

    def ipc_handle(self) -> bytes:
        return self.name.encode()

    @classmethod
    def from_ipc_handle(cls, _device: Any, handle: bytes) -> Event:
        event = cls()
        event.name = handle.decode()
        return event


DEFAULT = Stream(name="default")


def _stack() -> list[Stream]:
    if not hasattr(_thread, "stack"):
        _thread.stack = [DEFAULT]
    return _thread.stack


def current(*_) -> Stream:
    """This thread's stream."""
    return _stack()[-1]


def set_current(stream: Stream) -> None:
    """torch.cuda.set_stream."""
    _stack()[-1] = stream


class using:
    """torch.cuda.stream(stream); None: no change."""

    def __init__(self, stream: Stream | None):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *_) -> None:
        if self._stream is not None:
            self._stream.__exit__()
