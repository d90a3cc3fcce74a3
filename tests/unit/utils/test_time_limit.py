"""Code that does not end is ended, in any thread; what ends in time is never disturbed afterwards."""

from __future__ import annotations

import threading
import time

import pytest

from slime_like.utils.time_limit import TimeIsUp, time_limit


def spin(seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_an_endless_loop_ends():
    start = time.monotonic()
    with pytest.raises(TimeIsUp), time_limit(0.2):
        spin()
    assert 0.15 < time.monotonic() - start < 10


def test_limits_of_several_threads_hit_their_own():
    ended: dict[str, bool] = {}

    def work(name: str, limit: float, seconds: float) -> None:
        try:
            with time_limit(limit):
                spin(seconds)
            ended[name] = False
        except TimeIsUp:
            ended[name] = True

    jobs = [("endless", 0.2, 60.0), ("short", 30.0, 0.4), ("endless too", 0.5, 60.0)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended == {"endless": True, "short": False, "endless too": True}


def test_nothing_arrives_after_the_block():
    for _ in range(300):  # ends about when its time does
        try:
            with time_limit(0.001):
                spin(0.001)
        except TimeIsUp:
            continue
        spin(0.002)


def test_the_inner_of_two_limits_is_the_first():
    with time_limit(30.0):
        with pytest.raises(TimeIsUp), time_limit(0.1):
            spin()
        spin(0.05)


def test_limits_hold_after_thousands_that_ended_about_when_their_time_did():
    """One that arrived while a lock was being taken left it taken: no limit of that process held any more."""
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        try:
            with time_limit(30.0), time_limit(0.0005):
                spin(0.0005)
        except TimeIsUp:
            continue
    start = time.monotonic()
    with pytest.raises(TimeIsUp), time_limit(0.1):
        spin()
    assert time.monotonic() - start < 10
