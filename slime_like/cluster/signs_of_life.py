"""Datagrams by which a process says that it runs: one that is stopped, swapped out, or whose machine hangs, sends none.

    the driver   ear = Ear(host, num_senders)      # and, each second that it waits for them: ear.silent(300.0)
    a rank       speak(ear.address, number)        # from a thread of its own, so also while it computes

A call that hangs in its process is not noticed by this; such waits have deadlines of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping

#: How often a process speaks.
_EVERY_S = 1.0
#: Nobody looked for longer than this: perhaps everybody stood still, so that others get as long to speak again.
_AWAY_S = 5.0
#: number, process id, and a count that makes each datagram another one, so that none can be sent again by a stranger.
_SAID = struct.Struct("!IIQ")
_MAC_BYTES, _KEY_BYTES = 16, 32
#: A datagram waits for the driver's look in this much memory, or as much as the machine allows.
_BUFFER_BYTES = 1 << 22
#: Of that memory each takes at most this.
_DATAGRAM_BYTES = 1024
#: At most so many are taken in a look, whoever sends them.
_AT_ONCE = 20_000


@dataclasses.dataclass(frozen=True)
class EarAddress:
    """Where datagrams go, and the key that signs them."""

    host: str
    port: int
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Silence:
    """How long nothing was heard of a process that had spoken before."""

    seconds: float
    pid: int


class Ear:
    """Hears so many processes; host: an address of this machine that they reach.

    No thread: `silent` is asked each second while they are waited for.
    """

    def __init__(self, host: str, num_senders: int):
        self._socket = _datagrams(host)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind((host, 0))
        self._socket.setblocking(False)
        self.address = EarAddress(host, self._socket.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self._num_senders = num_senders
        self._counts: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _DATAGRAM_BYTES
        self._looked = self._back = time.monotonic()

    def silent(self, seconds: float) -> Mapping[int, Silence]:
        """Processes that have said nothing for longer than `seconds`, by number.

        One that was never heard is not among them: no datagram of its machine may come through. Nor is anybody just
        after a time in which nobody asked; if that was so long that datagrams may have been lost, silence counts anew.
        """
        now = time.monotonic()
        for number, pid, count in self._said():
            if number < self._num_senders and count > self._counts.get(number, -1):
                self._counts[number], self._pids[number], self._heard[number] = count, pid, now
        away, self._looked = now - self._looked, now
        if away > _AWAY_S:
            self._back = now
            if away / _EVERY_S * self._num_senders > self._room:
                self._heard = dict.fromkeys(self._heard, now)
        if now - self._back < _AWAY_S:
            return {}
        return {
            number: Silence(now - heard, self._pids[number])
            for number, heard in sorted(self._heard.items())
            if now - heard > seconds
        }

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()

    def _said(self) -> Iterator[tuple[int, int, int]]:
        """What the datagrams say that wait and were signed with our key."""
        for _ in range(_AT_ONCE):
            try:
                datagram = self._socket.recv(_SAID.size + _MAC_BYTES + 1)
            except OSError:  # none is left, or closed
                return
            said, mac = datagram[: _SAID.size], datagram[_SAID.size :]
            if len(said) == _SAID.size and hmac.compare_digest(mac, _mac(self.address.key, said)):
                yield _SAID.unpack(said)


def speak(address: EarAddress, number: int) -> None:
    """Say from now on that this process runs."""
    threading.Thread(target=_speak, args=(address, number), name="signs of life", daemon=True).start()


def _speak(address: EarAddress, number: int) -> None:
    with _datagrams(address.host) as mouth:
        while True:
            said = _SAID.pack(number, os.getpid(), time.monotonic_ns())
            with contextlib.suppress(OSError):  # of a network that fails for a moment
                mouth.sendto(said + _mac(address.key, said), (address.host, address.port))
            time.sleep(_EVERY_S)


def _datagrams(host: str) -> socket.socket:
    return socket.socket(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0], socket.SOCK_DGRAM)


def _mac(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, said, "sha256")[:_MAC_BYTES]
