"""The rollout side in its asynchronous modes, on a scripted engine."""

from __future__ import annotations

import time

import pytest

from slime_like.records import WeightsRef
from slime_like.testing.scripted_engine import Fault
from slime_like.utils.files import RunDirectory, read_json_lines
from tests.unit.rollout.rows import indexes


def sync(manager, engine, version: int, steps: int) -> None:
    """As a weight sync that ends running requests: the engine's version, and what the rollout side is told."""
    manager.policy_changing()
    engine.weight_version = str(version)
    manager.policy_changed(WeightsRef(version=version), steps)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ledger_of(metrics: dict) -> dict[str, float]:
    return {
        name.rpartition("/")[2]: value
        for name, value in metrics.items()
        if name.startswith("rollout/ledger/") and value
    }


def test_generation_goes_on_between_two_rollouts_as_far_as_staleness_allows(start_manager):
    manager, engine = start_manager(async_mode="full", max_staleness=1)
    sync(manager, engine, 1, 0)
    first = manager.generate(0)
    wait_until(lambda: len(engine.requests) == 8)
    time.sleep(0.2)
    assert indexes(first) == [0, 1] and len(engine.requests) == 8  # two batches of two groups of two, and no more
    manager.trained([0, 1])
    second = manager.generate(1)
    metrics = second.metrics
    assert indexes(second) == [2, 3] and metrics["async/staleness_max"] == 1
    assert metrics["async/rollout_held_seconds"] > 0.15  # the trainer's turn
    assert ledger_of(metrics) == {"trained": 2, "taken": 2} and len(engine.requests) == 8
    manager.trained([2, 3])
    sync(manager, engine, 2, 2)
    third = manager.generate(2)
    assert indexes(third) == [4, 5] and third.metrics["async/staleness_max"] == 0


def test_one_step_ahead(start_manager):
    manager, engine = start_manager(async_mode="one-step")
    sync(manager, engine, 1, 0)
    manager.begin(0)
    manager.begin(0)
    first = manager.generate(0)
    manager.begin(1)
    manager.settle()
    assert len(engine.requests) == 8
    sync(manager, engine, 2, 1)
    second = manager.generate(1)
    assert (indexes(first), indexes(second)) == ([0, 1], [2, 3])
    assert second.metrics["async/staleness_mean"] == 1 and second.metrics["async/version_spread_max"] == 0


def test_an_answer_that_a_sync_ends_is_gone_on_with_in_full_mode(start_manager):
    """Its tokens of the first version stay; --update-weight-pause-mode abort."""
    ended = []

    def fault(body):
        if len(ended) < 3:
            ended.append(body)
            return Fault(delay_s=0.5, abort=3)
        return None

    manager, engine = start_manager(
        async_mode="full",
        max_staleness=0,
        update_weight_pause_mode="abort",
        engine_options={"fault_for": fault},
    )
    sync(manager, engine, 1, 0)
    future = manager.start_generate(0)
    wait_until(lambda: len(ended) == 3)
    sync(manager, engine, 2, 0)
    result = future.result(timeout=10)
    assert len(ended) == 3 and result.metrics["async/continued_requests"] == 3
    assert result.metrics["async/tokens_thrown_away"] == 3 and result.metrics["rollout/interrupted_requests"] == 0
    assert sum(len(body["input_ids"]) > len(ended[0]["input_ids"]) for body in engine.requests) >= 3


def test_a_partial_rollout_takes_what_is_done_and_goes_on_with_the_rest(start_manager):
    """The first prompt's answers take long; they are ended when the rollout is full, and lead the next one."""
    slow = []

    def fault(body):
        if not slow or (body["input_ids"] == slow[0] and len(slow) < 2):
            slow.append(body["input_ids"])
            return Fault(delay_s=60.0)
        return None

    manager, engine = start_manager(
        partial_rollout=True,
        over_sampling_batch_size=3,
        mask_offpolicy_in_partial_rollout=True,
        engine_options={"fault_for": fault},
    )
    sync(manager, engine, 1, 0)
    first = manager.generate(0)
    assert indexes(first) == [1, 2] and first.metrics["async/continued_requests"] == len(slow) == 2
    assert ledger_of(first.metrics) == {"in_flight": 1, "taken": 2}
    assert engine._in_flight == {}  # memory may change hands
    manager.trained([1, 2])
    sync(manager, engine, 2, 1)
    assert manager.evaluate(1) == {}
    second = manager.generate(1)
    assert indexes(second)[0] == 0 and second.metrics["async/staleness_max"] == 0


def test_evaluation_is_not_held_while_a_partial_rollout_is(start_manager, write_rows):
    held_out = write_rows([{"prompt": [{"role": "user", "content": "sort 91"}], "label": "19"}], "held-out.jsonl")
    manager, engine = start_manager(
        partial_rollout=True, eval_prompt_data=["held_out", held_out], eval_interval=1, update_weights_interval=1
    )
    sync(manager, engine, 1, 0)
    manager.generate(0)
    assert manager.evaluate(1)["eval/held_out/reward_mean"] == 1


@pytest.mark.parametrize("policy", ["drop", "requeue", "train"])
def test_a_group_that_comes_too_late_meets_the_policy(start_manager, policy: str, tmp_path):
    """Prompt 0 takes until it is four rollouts stale, with one allowed."""
    seen = []

    def fault(body):
        seen.append(body["input_ids"])
        return Fault(delay_s=2.0) if len(seen) == 1 else None

    manager, engine = start_manager(
        async_mode="full",
        max_staleness=1,
        stale_policy=policy,
        engine_options={"fault_for": fault},
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        num_rollout=6,
        run_dir=str(tmp_path),
    )
    totals = {"dropped": 0.0, "requeued": 0.0, "late": 0.0}
    trained = []
    for step in range(5):
        if step == 4:  # so late that the first answer is there
            wait_until(lambda: not engine._in_flight)
        sync(manager, engine, step + 1, step)
        result = manager.generate(step)
        trained += indexes(result)
        manager.trained(indexes(result))
        for name in totals:
            totals[name] += result.metrics[f"async/{name}_groups"]
    assert tuple(totals.values()) == {"drop": (1, 0, 0), "requeue": (0, 1, 0), "train": (0, 0, 1)}[policy]
    prompts = {"drop": [1, 2, 3, 4, 5], "requeue": [0, 1, 2, 3, 4], "train": [0, 1, 2, 3, 4]}[policy]
    assert sorted(trained) == prompts and trained[:2] == [1, 2]
    dropped = RunDirectory(str(tmp_path)).dropped
    named = read_json_lines(dropped) if dropped.exists() else []
    assert named == ([{"prompt": 0, "why": "stale"}] if policy == "drop" else [])
