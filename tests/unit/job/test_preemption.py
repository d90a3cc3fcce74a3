"""A signal asks a run to save and to end: at once where it waits, after its work where it works, within a bound."""

from __future__ import annotations

import os
import signal
import time

import pytest

from slime_like.job.preemption import STATUS, Preempted, Preemption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_wait_is_given_up_at_once(number):
    preemption = Preemption(5.0)
    with preemption.listening(), pytest.raises(Preempted, match=number.name), preemption.interruptible():
        os.kill(os.getpid(), number)
        time.sleep(3)
        raise AssertionError("it went on")


def test_work_goes_to_its_end():
    preemption, done = Preemption(5.0), []
    with preemption.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler's second, to every process of the job
        time.sleep(0.1)
        done.append("work")
        with pytest.raises(Preempted):
            preemption.check()
        with pytest.raises(Preempted), preemption.interruptible():
            done.append("a wait that is not begun any more")
    assert done == ["work"]


def test_the_bound_ends_a_run_that_does_not_get_to_its_save(capfd):
    preemption, started = Preemption(0.3), time.monotonic()
    with pytest.raises(SystemExit) as end, preemption.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert end.value.code == STATUS == 143 and time.monotonic() - started < 3
    assert "0.3 s (--preemption-timeout-s) are over" in capfd.readouterr().err


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]
    with Preemption(5.0).listening():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
