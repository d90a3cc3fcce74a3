"""Another user of this host: a process with another user id that listens on a port. Needs root."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

#: `nobody`, whose name every host has.
UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can run a process as another user")


@contextlib.contextmanager
def stranger_listening() -> Iterator[tuple[int, int]]:
    """(port, pipe): user 65534 listens on that port of loopback, and what a first caller sends is to be read from the
    pipe.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            with socket.create_server(("127.0.0.1", 0)) as server:
                os.write(write, f"{server.getsockname()[1]}\n".encode())
                while True:
                    connection, _ = server.accept()
                    connection.settimeout(2)
                    with connection, contextlib.suppress(OSError):
                        os.write(write, b"called:" + connection.recv(4096))
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield int(os.read(read, 64)), read
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)


def heard(pipe: int, seconds: float = 0.3) -> bytes:
    """What the stranger was sent; a call without a word counts."""
    return os.read(pipe, 4096) if select.select([pipe], [], [], seconds)[0] else b""
