"""What is refused, and what follows, where generating and training overlap."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.async_rules import async_problems, corrected
from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.config.loss import LossConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.serving import ServingConfig
from slime_like.config.sync import SyncConfig

FULL, PARTIAL = AsyncConfig(async_mode="full"), AsyncConfig(partial_rollout=True)
SHARE, EVAL = AsyncConfig(eval_async=True, eval_num_engines=1), EvalConfig(eval_interval=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_weights_interval": 0}, "--update-weights-interval 0: must be at least 1"),
        ({"async_mode": "full", "max_staleness": -1}, "--max-staleness -1: must not be negative"),
        ({"async_mode": "one-step", "max_staleness": 2}, "--max-staleness 2 does nothing with --async-mode one-step"),
        ({"partial_rollout": True, "stale_policy": "drop"}, "--stale-policy drop does nothing without --max-staleness"),
        ({"async_mode": "full", "update_weights_interval": 3}, "cannot be kept with --update-weights-interval 3"),
        ({"async_mode": "full", "partial_rollout": True}, "--partial-rollout does nothing with --async-mode full"),
        ({"mask_offpolicy_in_partial_rollout": True}, "does nothing without --partial-rollout"),
        ({"eval_num_engines": 1}, "--eval-num-engines 1 does nothing without --eval-async"),
        ({"eval_async": True, "eval_num_engines": -1}, "--eval-num-engines -1: must not be negative"),
    ],
)
def test_flags_that_contradict_each_other(options: dict, message: str):
    (problem,) = AsyncConfig(**options).problems()
    assert message in problem and (problem.count("Fix: ") == 1 or "must" in problem)


@pytest.mark.parametrize("way", [{"update_weight_transport": "disk"}, {"update_weight_mode": "delta"}])
def test_engines_that_load_a_folder_may_roll(way: dict):
    assert async_problems(RunConfig(asynchrony=FULL, sync=SyncConfig(update_weight_rolling=True, **way))) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_mode": "one-step", "update_weights_interval": 2},
        {"async_mode": "full", "max_staleness": 0},
        {"async_mode": "full", "max_staleness": 2, "update_weights_interval": 3, "stale_policy": "requeue"},
        {"partial_rollout": True, "max_staleness": 3, "stale_policy": "drop"},
    ],
)
def test_what_goes_together(options: dict):
    assert AsyncConfig(**options).problems() == [] == async_problems(RunConfig(asynchrony=AsyncConfig(**options)))


ROLLING = {"update_weight_rolling": True}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"sync": SyncConfig(**ROLLING, update_weight_transport="disk")},
            "--update-weight-rolling needs --async-mode full",
        ),
        ({"asynchrony": FULL, "sync": SyncConfig(**ROLLING)}, "--update-weight-transport broadcast, the default"),
        (
            {"asynchrony": FULL, "sync": SyncConfig(**ROLLING, update_weight_transport="ipc")},
            "ipc: all engines",
        ),
        ({"asynchrony": FULL, "sync": SyncConfig(**ROLLING, update_weight_mode="adapter")}, "no engine pauses"),
        ({"asynchrony": FULL, "placement": PlacementConfig(colocate=True)}, "take turns on the same GPUs"),
        (
            {"asynchrony": AsyncConfig(update_weights_interval=2), "placement": PlacementConfig(colocate=True)},
            "engines give their memory back",
        ),
        ({"asynchrony": AsyncConfig(eval_async=True)}, "--eval-async does nothing without --eval-interval"),
        (
            {"asynchrony": SHARE, "eval": EVAL, "placement": PlacementConfig(colocate=True)},
            "--eval-async does not go with --colocate",
        ),
        ({"asynchrony": SHARE}, "--eval-async does nothing without --eval-interval"),
        (
            {"asynchrony": dataclasses.replace(SHARE, update_weights_interval=2), "eval": EVAL},
            "--eval-interval 3 is no multiple of --update-weights-interval 2",
        ),
        ({"asynchrony": SHARE, "eval": EVAL, "serving": ServingConfig(serve_rollout=True)}, "ask the same endpoint"),
        ({"asynchrony": FULL, "placement": PlacementConfig(debug_rollout_only=True)}, "trains nothing"),
        ({"asynchrony": PARTIAL, "loss": LossConfig(loss_type="sft_loss")}, "--partial-rollout: this run samples"),
        ({"asynchrony": FULL, "loss": LossConfig(use_rollout_routing_replay=True)}, "whose routers choose other"),
        ({"asynchrony": PARTIAL, "rollout": RolloutConfig(rollout_function_path="a.b")}, "groups that outlive one"),
        ({"asynchrony": FULL, "rollout": RolloutConfig(over_sampling_batch_size=64)}, "--max-staleness allows"),
        (
            {
                "asynchrony": FULL,
                "sync": SyncConfig(update_weight_pause_mode="in_place"),
                "loss": LossConfig(use_tis=False),
            },
            "--no-use-tis leaves that uncorrected",
        ),
    ],
)
def test_combinations_that_are_refused_say_why_and_what_to_do(groups: dict, message: str):
    (problem,) = async_problems(RunConfig(**groups))
    assert message in problem and "Fix: " in problem


def test_partial_rollouts_go_with_colocated_engines_and_over_sampling():
    config = RunConfig(
        asynchrony=PARTIAL,
        placement=PlacementConfig(colocate=True),
        rollout=RolloutConfig(over_sampling_batch_size=64),
    )
    assert async_problems(config) == []


def test_older_samples_are_weighed_unless_something_else_is_said():
    def weighs(asynchrony=FULL, **loss) -> bool | None:
        return corrected(RunConfig(asynchrony=asynchrony, loss=LossConfig(**loss))).loss.use_tis

    assert weighs() and weighs(PARTIAL) and weighs(AsyncConfig(async_mode="one-step"))
    assert weighs(AsyncConfig(update_weights_interval=2))
    assert weighs(AsyncConfig()) is None  # nothing is older there
    assert weighs(use_tis=False) is False and weighs(use_rollout_logprobs=True) is None
    config = RunConfig(asynchrony=FULL, sync=SyncConfig(update_weight_pause_mode="in_place"))
    assert len(async_problems(config)) == 1 and async_problems(corrected(config)) == []


def test_how_running_requests_meet_a_sync():
    def mode(asynchrony, pause=None):
        config = RunConfig(asynchrony=asynchrony, sync=SyncConfig(update_weight_pause_mode=pause))
        return config.pause_mode, config.keeps_partial_answers

    assert mode(AsyncConfig()) == ("abort", False) and mode(PARTIAL) == ("abort", True)
    assert mode(FULL) == ("retract", False) and mode(FULL, "abort") == ("abort", True)
    assert mode(dataclasses.replace(FULL, async_mode="one-step")) == ("abort", False)
