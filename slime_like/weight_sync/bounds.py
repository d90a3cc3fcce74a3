"""How fast bytes could go at best on this machine, measured in some 20 ms when a run connects: what a receipt's share
refers to.

A glance and no benchmark (for those see benchmarks/weight_sync.py): other work on the machine at that moment makes the
bound look lower.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch

from slime_like.config.transports import transport_of
from slime_like.utils.net import is_own_address, url_host
from slime_like.weight_sync.buckets import PublisherOptions

logger = logging.getLogger(__name__)

_NUM_BYTES = 8 << 20
_REPEATS = 3


def best_rate(options: PublisherOptions) -> float | None:
    """Bytes a second of what bounds a transport: one copy in memory, a loopback connection (to engines on this
    machine), one write into the folder. None where it cannot be known from here: on a GPU, with engines elsewhere, with
    deltas.
    """
    measures: dict[str, Callable[[str | None], contextlib.AbstractContextManager[Callable[[], None]]]] = {
        "memory": _copy,
        "loopback": _loopback,
        "file": _write,
    }
    kind = transport_of(options.transport).best_rate
    if kind is None or torch.cuda.is_available():
        return None
    if kind == "loopback" and not all(is_own_address(url_host(endpoint.url)) for endpoint in options.endpoints):
        return None
    seconds = []
    try:
        with measures[kind](options.directory) as move:
            for _ in range(_REPEATS):
                start = time.perf_counter()
                move()
                seconds.append(time.perf_counter() - start)
    # a full disk, say: a sync that fits must not fail for a number, and one that does not says so itself
    except OSError as error:
        logger.warning("what bounds the %s transport is not known: %s", options.transport, error)
        return None
    return _NUM_BYTES / min(seconds)


@contextlib.contextmanager
def _copy(directory: str | None) -> Iterator[Callable[[], None]]:
    source, target = (torch.ones(_NUM_BYTES, dtype=torch.uint8) for _ in range(2))
    yield lambda: target.copy_(source)


@contextlib.contextmanager
def _write(directory: str | None) -> Iterator[Callable[[], None]]:
    assert directory is not None, "the disk transport has a folder"
    data = bytes(_NUM_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:

        def move() -> None:
            os.ftruncate(file.fileno(), 0)
            written = 0
            while written < _NUM_BYTES:
                written += os.pwrite(file.fileno(), memoryview(data)[written:], written)

        yield move


@contextlib.contextmanager
def _loopback(directory: str | None) -> Iterator[Callable[[], None]]:
    data, into = bytes(_NUM_BYTES), bytearray(_NUM_BYTES)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5.0) as sender,
    ):
        receiver, _ = server.accept()

        def move() -> None:
            thread = threading.Thread(target=sender.sendall, args=(data,), daemon=True)
            thread.start()
            received = 0
            while received < _NUM_BYTES:
                count = receiver.recv_into(memoryview(into)[received:])
                if not count:
                    raise OSError("the loopback connection was closed")
                received += count
            thread.join()

        with receiver:
            receiver.settimeout(5.0)
            yield move
