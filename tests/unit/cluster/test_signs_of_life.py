"""Who says nothing is known; a stranger can neither speak for others nor silence them."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from slime_like.cluster import signs_of_life
from slime_like.cluster.signs_of_life import Ear, EarAddress, speak


@pytest.fixture
def ear() -> Iterator[Ear]:
    of_driver = Ear("127.0.0.1", num_senders=2)
    yield of_driver
    of_driver.close()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The driver's clock: a list of one number."""
    now = [time.monotonic()]
    monkeypatch.setattr(signs_of_life.time, "monotonic", lambda: now[0])
    return now


def say(address: EarAddress, number: int, count: int, *, pid: int = 7) -> bytes:
    """Send a rank's words once; the datagram."""
    said = struct.pack("!IIQ", number, pid, count)
    return send(address, said + signs_of_life._mac(address.key, said))


def send(address: EarAddress, datagram: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        mouth.sendto(datagram, (address.host, address.port))
    return datagram


def wait(ear: Ear, clock: list[float], seconds: float) -> None:
    """So much time in which the driver looks each second."""
    for _ in range(round(seconds)):
        ear.silent(1e9)
        clock[0] += 1.0


def test_one_that_stopped_speaking_is_silent_and_one_that_never_spoke_is_not(ear, clock):
    say(ear.address, 1, 1)
    wait(ear, clock, 9)
    assert ear.silent(10.0) == {}
    wait(ear, clock, 3)
    (number, silence), *others = ear.silent(10.0).items()
    assert (number, silence.pid, others) == (1, 7, []) and silence.seconds == pytest.approx(12.0)
    say(ear.address, 1, 2)
    assert ear.silent(10.0) == {}


def test_who_spoke_while_nobody_looked_is_heard_and_all_get_a_moment(ear, clock):
    for number in (0, 1):
        say(ear.address, number, 1)
    wait(ear, clock, 6)
    clock[0] += 12.0  # the driver was stopped
    say(ear.address, 1, 2)
    assert ear.silent(10.0) == {}
    wait(ear, clock, 6)
    ((number, silence),) = ear.silent(10.0).items()
    assert number == 0 and silence.seconds == pytest.approx(24.0)


def test_after_so_long_that_datagrams_may_be_lost_silence_counts_anew(ear, clock):
    say(ear.address, 0, 1)
    wait(ear, clock, 6)
    clock[0] += 1e6
    wait(ear, clock, 9)
    assert ear.silent(10.0) == {}
    wait(ear, clock, 3)
    assert list(ear.silent(10.0)) == [0]


def test_strangers_are_not_heard(ear, clock):
    said = say(ear.address, 0, 5)
    wait(ear, clock, 12)
    send(ear.address, said)  # again
    say(ear.address, 0, 4)  # older
    say(dataclasses.replace(ear.address, key=b"guessed"), 0, 9)
    say(ear.address, 2, 1)  # of no rank
    for junk in (b"", b"x", said[:-1], said + b"x", os.urandom(60_000)):
        send(ear.address, junk)
    assert list(ear.silent(10.0)) == [0]
    assert ear.address.key.hex() not in repr(ear.address) and repr(ear.address.key) not in repr(ear.address)


def test_a_flood_of_a_stranger_does_not_keep_the_driver(ear):
    for _ in range(20_000):
        send(ear.address, b"x" * 32)
    started = time.monotonic()
    ear.silent(10.0)
    assert time.monotonic() - started < 1.0


def test_a_process_speaks_while_it_computes(ear):
    words = (
        "import sys; from slime_like.cluster.signs_of_life import EarAddress, speak\n"
        f"speak(EarAddress('127.0.0.1', {ear.address.port}, bytes.fromhex('{ear.address.key.hex()}')), 1)\n"
        "while True: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", words])
    try:
        until = time.monotonic() + 30
        while not ear._heard and time.monotonic() < until:
            ear.silent(10.0)
            time.sleep(0.05)
        first = ear._counts[1]
        assert ear._pids == {1: process.pid}
        while ear._counts[1] == first and time.monotonic() < until:
            ear.silent(10.0)
            time.sleep(0.05)
        assert ear._counts[1] > first
    finally:
        process.kill()
        process.wait()


def test_an_ear_that_is_gone_harms_nobody(ear):
    address = ear.address
    ear.close()
    speak(address, 0)
    assert ear.silent(1.0) == {}
