"""Work that is slowed passes slower, and what was planned before is void."""

from __future__ import annotations

import pytest

from slime_like.planning.simulate.generation import EventQueue
from slime_like.planning.simulate.trainer import SimulatedTrainer


def test_work_passes_at_the_pace_of_each_stretch():
    events, ends = EventQueue(), []
    trainer = SimulatedTrainer(events, lambda: ends.append(events.now))
    trainer.begin(10.0)
    events.at(4.0, trainer.slow, 2.0)  # 6 s of work are left: 12 s
    events.at(8.0, trainer.slow, 1.0)  # 4 s of work are left
    while events.step():
        pass
    assert ends == [pytest.approx(12.0)] and trainer.busy_s == pytest.approx(12.0) and not trainer.is_busy


def test_alone_it_takes_what_it_takes():
    events, ends = EventQueue(), []
    trainer = SimulatedTrainer(events, lambda: ends.append(events.now))
    for _ in range(2):
        trainer.begin(3.0)
        while events.step():
            pass
    assert ends == [3.0, 6.0] and trainer.busy_s == 6.0
