"""Tickets: one source at a time, in the order of who is ready, and what a failure does to the others."""

from __future__ import annotations

import threading
import time

import pytest

from slime_like.errors import WaitTimeout, WeightSyncError
from slime_like.weight_sync.transports.sources import Sources


@pytest.fixture
def three():
    host = Sources("127.0.0.1", 0, is_host=True, who="source 0", timeout_s=5)
    return [host] + [
        Sources("127.0.0.1", host.port, is_host=False, who=f"source {number}", timeout_s=5) for number in (1, 2)
    ]


def test_never_two_at_a_time_and_each_gets_its_turns(three):
    inside, most, done = [], [], []

    def work(turns, number):
        turns.new_round()
        for bucket in range(number + 2):  # a different number each
            with turns.turn(f"bucket {bucket}"):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.002)
                inside.remove(number)
                done.append(number)

    threads = [threading.Thread(target=work, args=(turns, number)) for number, turns in enumerate(three)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert max(most) == 1
    assert sorted(done) == [0] * 2 + [1] * 3 + [2] * 4


def test_a_failure_ends_all_who_come_later_and_the_next_round_is_free_of_it(three):
    first, second, third = three
    for turns in three:
        turns.new_round()
    with pytest.raises(RuntimeError), first.turn("bucket 0"):
        raise RuntimeError("engine 1 refused")
    for turns in (second, third):
        with (
            pytest.raises(
                WeightSyncError, match="stops its bucket 0: source 0, bucket 0: RuntimeError: engine 1 refused"
            ),
            turns.turn("bucket 0"),
        ):
            raise AssertionError("it was let in")
    for turns in three:
        turns.new_round()
    with second.turn("bucket 0"):
        pass
    with first.turn("bucket 0"):
        pass


def test_a_turn_that_is_never_given_on_ends_at_the_deadline():
    holder = Sources("127.0.0.1", 0, is_host=True, who="source 0", timeout_s=5)
    waiting = Sources("127.0.0.1", holder.port, is_host=False, who="source 1", timeout_s=0.3)
    held = holder.turn("bucket 0")
    held.__enter__()
    with (
        pytest.raises(WaitTimeout, match="source 1 waited .* for its turn, number 2 .* during bucket 3"),
        waiting.turn("bucket 3"),
    ):
        raise AssertionError("it was let in")
    held.__exit__(None, None, None)
