"""What a perfect program would need to move some bytes on this host, measured beside the transports that are judged by
it.

    memcpy   the bytes copied once, by one thread, from one array into another; both were touched before
    socket   the bytes sent once over one TCP connection on loopback, into another process's array touched before
    disk     the bytes written once into one new file of the given folder, not forced to the medium (an engine reads
             them from the page cache), then read once into an array touched before

Hashing, naming and converting are work that a perfect program would hide, so no bound has them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from slime_like.errors import WaitTimeout

#: What bounds each way of moving weights: one copy into the engine's tensors, one trip through a socket, one file
#: written and read. For delta it is a trip of all bytes, as if nothing were saved.
BOUND_OF = {"ipc": "memcpy", "broadcast": "socket", "disk": "disk", "delta": "socket", "inline": "socket"}
BOUNDS = ("memcpy", "socket", "disk")
_TIMEOUT_S = 60.0

_RECEIVER = """
import socket, sys
port, size = int(sys.argv[1]), int(sys.argv[2])
array = bytearray(size)
array[::4096] = bytes(len(range(0, size, 4096)))
left = memoryview(array)
with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
    peer.sendall(b"r")
    while left:
        count = peer.recv_into(left)
        if not count:
            sys.exit("the sender closed the connection")
        left = left[count:]
    peer.sendall(b"d")
"""


class BoundMeter:
    """Measures every bound for `num_bytes`; call it once beside each repeat of what is judged.

    folder: where the disk transport writes.
    """

    def __init__(self, num_bytes: int, folder: Path):
        self._source = np.ones(num_bytes, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self._target.fill(2)  # zeros alone are not backed by memory yet
        self._path = folder / "bound.bin"

    def measure(self) -> dict[str, float]:
        """Seconds of each."""
        return {"memcpy": self._memcpy(), "socket": self._socket(), "disk": self._disk()}

    def _memcpy(self) -> float:
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started

    def _socket(self) -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_TIMEOUT_S)
            command = [sys.executable, "-I", "-c", _RECEIVER, str(server.getsockname()[1]), str(self._source.nbytes)]
            receiver = subprocess.Popen(command)
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(_TIMEOUT_S)
                    connection.recv(1)
                    started = time.perf_counter()
                    connection.sendall(self._source.data)
                    connection.recv(1)
                    seconds = time.perf_counter() - started
                if receiver.wait(_TIMEOUT_S):
                    raise RuntimeError(f"the receiver of the loopback bound ended with status {receiver.returncode}")
            except TimeoutError as error:
                raise WaitTimeout(
                    who="the loopback bound", whom="its receiver", phase="measure", seconds=_TIMEOUT_S, last=str(error)
                ) from error
            finally:
                if receiver.poll() is None:
                    receiver.kill()
                    receiver.wait()
        return seconds

    def _disk(self) -> float:
        try:
            started = time.perf_counter()
            with open(self._path, "wb", buffering=0) as file:
                left = self._source.data
                while left:
                    left = left[os.write(file.fileno(), left) :]
            with open(self._path, "rb", buffering=0) as file:
                view = self._target.data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise RuntimeError(f"{self._path} ended early")
                    view = view[count:]
            return time.perf_counter() - started
        finally:
            self._path.unlink(missing_ok=True)
