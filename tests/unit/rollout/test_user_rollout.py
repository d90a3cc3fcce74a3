"""Rollout and evaluation functions of the user's own, on a scripted engine."""

from __future__ import annotations

import pytest

from slime_like.errors import RunError
from slime_like.rollout.user_rollout import NOT_RETURNED
from tests.unit.rollout.rows import digits_row, indexes

EXAMPLES, OWN = "scripts.examples.hooks.", "tests.unit.rollout.own_rollouts."


def test_the_example_probes_twice_as_many_prompts(start_manager, tmp_path):
    manager, engine = start_manager(
        rollout_function_path=EXAMPLES + "twice_as_many_prompts", custom={"probe_reward": 0.5}
    )
    result = manager.generate(0)
    assert indexes(result) == [0, 1] and [len(group.samples) for group in result.groups] == [2, 2]
    assert len(engine.requests) == 4 + 2 * 2
    metrics = result.metrics
    assert metrics["rollout/probe_reward_mean"] == 1 and metrics["rollout/prompts"] == 4
    assert metrics["rollout/ledger/dropped"] == 2 and metrics["rollout/ledger/taken"] == 2
    manager.trained(indexes(result))
    assert manager.snapshot()[0]["data"]["dropped"] == {NOT_RETURNED: 2}
    assert indexes(manager.generate(1)) == [4, 5]


def test_the_built_in_rollout_can_be_called_and_changed(start_manager):
    manager, _ = start_manager(rollout_function_path=OWN + "built_in_without_the_first")
    result = manager.generate(0)
    assert indexes(result) == [1, 2] and manager.snapshot()[0]["data"]["dropped"] == {NOT_RETURNED: 1}
    manager.trained(indexes(result))
    assert indexes(manager.generate(1)) == [4, 5]


def test_what_is_put_back_is_drawn_again(start_manager):
    manager, _ = start_manager(rollout_function_path=OWN + "every_other_put_back")
    assert indexes(manager.generate(0)) == [0, 2]
    assert indexes(manager.generate(1)) == [1, 4]  # 1 and 3 were put back


def test_samples_of_ones_own_are_scored_by_the_flags(start_manager):
    manager, engine = start_manager(rollout_function_path=OWN + "answers_from_a_book")
    result = manager.generate(0)
    assert not engine.requests and result.metrics["rollout/reward_mean"] == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "gave \\[\\]; it must give a list of records.SampleGroup"),
        ("text", "gave hello; it must give a list of records.SampleGroup"),
        ("unscored", "sample [01]/0 has no reward. Fix: await rollout.score"),
        ("foreign", "gave groups of the prompts \\[77\\], which it did not draw"),
        ("twice", "gave two groups of one prompt, of \\[0, 0\\]"),
        ("raising", "the function raised KeyError: 'mine'"),
        ("text_metrics", "gave many; metrics are a dict"),
    ],
)
def test_a_bad_rollout_function_is_named_and_loses_no_prompt(start_manager, name: str, message: str):
    manager, _ = start_manager(rollout_function_path=OWN + name)
    with pytest.raises(RunError, match=f"--rollout-function-path {OWN}{name}: {message}"):
        manager.generate(0)
    state = manager.snapshot()[0]["data"]
    assert state["open"] == {} and state["dropped"] == {} and len(state["waiting"]) == state["position"]


def test_an_evaluation_of_ones_own(start_manager, write_rows):
    held_out = write_rows([digits_row(n) for n in range(1000, 1006)], "held-out.jsonl")
    manager, engine = start_manager(
        eval_function_path=EXAMPLES + "first_rows_only",
        eval_prompt_data=["held", held_out],
        eval_interval=1,
        n_samples_per_eval_prompt=2,
    )
    metrics = manager.evaluate(0)
    assert len(engine.requests) == 8 and metrics["eval/prompts"] == 4
    assert metrics["eval/held/samples"] == 8 and metrics["eval/held/pass@2"] == 1
    assert manager.snapshot()[0]["data"]["position"] == 0


def test_an_evaluation_needs_no_data_of_ours(start_manager):
    manager, _ = start_manager(eval_function_path=OWN + "own_eval_set", eval_interval=1)
    assert manager.evaluate(0)["eval/own/reward_mean"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [("eval_nothing", "gave {}; it must give"), ("eval_unscored", "the set 'own': prompt 0: samples \\[0\\] have no")],
)
def test_a_bad_evaluation_function_is_named(start_manager, name: str, message: str):
    manager, _ = start_manager(eval_function_path=OWN + name, eval_interval=1)
    with pytest.raises(RunError, match=f"--eval-function-path {OWN}{name}: {message}"):
        manager.evaluate(0)
