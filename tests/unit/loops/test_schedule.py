"""When a run saves and when it evaluates, by counting."""

from __future__ import annotations

import types

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.loops.schedule import evaluates_after, evaluates_before, saves_after, syncs_after


def job(
    *, num_rollout: int = 7, rollouts: object = "some", checkpoint: dict | None = None, evaluation: dict | None = None
):
    config = types.SimpleNamespace(
        checkpoint=CheckpointConfig(**(checkpoint or {})), eval=EvalConfig(**(evaluation or {}))
    )
    return types.SimpleNamespace(config=config, num_rollout=num_rollout, rollouts=rollouts)


@pytest.mark.parametrize(
    ("checkpoint", "saved"),
    [
        ({}, []),
        ({"save": "x"}, [7]),
        ({"save": "x", "save_interval": 3}, [3, 6, 7]),
        ({"save": "x", "save_interval": 7}, [7]),
    ],
)
def test_saves(checkpoint, saved):
    assert [done for done in range(1, 8) if saves_after(job(checkpoint=checkpoint), done)] == saved


def test_syncs():
    def syncs(interval: int, engines: object = "some") -> list[int]:
        config = types.SimpleNamespace(asynchrony=AsyncConfig(update_weights_interval=interval))
        run = types.SimpleNamespace(config=config, num_rollout=7, engines=engines)
        return [done for done in range(1, 8) if syncs_after(run, done)]

    assert syncs(1) == [1, 2, 3, 4, 5, 6, 7] and syncs(3) == [3, 6, 7] and syncs(1, None) == []


def test_evaluations():
    every_third = job(evaluation={"eval_interval": 3})
    assert [done for done in range(1, 8) if evaluates_after(every_third, done)] == [3, 6, 7]
    assert not any(evaluates_after(job(), done) for done in range(8))
    assert not any(evaluates_after(job(rollouts=None, evaluation={"eval_interval": 3}), done) for done in range(8))


def test_before_the_first_rollout():
    assert evaluates_before(job(evaluation={"eval_interval": 3}), 0)
    skipping = job(evaluation={"eval_interval": 3, "skip_eval_before_train": True})
    assert not evaluates_before(skipping, 0) and evaluates_before(skipping, 6), "a resumed run is no beginning"
