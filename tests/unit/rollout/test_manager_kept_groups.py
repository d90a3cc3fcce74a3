"""Which groups a rollout keeps: failed and filtered ones are replaced, up to a bound on prompts."""

from __future__ import annotations

import pytest

from slime_like.errors import RunError
from slime_like.testing.scripted_engine import Fault
from tests.unit.rollout.rows import digits_row, indexes

HERE = "tests.unit.rollout.user_functions"


def test_a_failed_request_is_made_good(start_manager):
    manager, _ = start_manager(engine_options={"faults": [Fault(status=400), None, Fault(abort=2)]})
    result = manager.generate(0)
    assert indexes(result) == [0, 1] and all(sample.reward == 1 for group in result.groups for sample in group.samples)
    assert result.metrics["rollout/failed_requests"] == 2 and result.metrics["rollout/failed_samples"] == 0


def test_a_group_that_keeps_failing_is_replaced_by_the_next_prompt(start_manager, tokenizer):
    bad = check_ids(tokenizer, digits_row(1))
    manager, _ = start_manager(
        engine_options={"fault_for": lambda body: Fault(status=400) if body["input_ids"] == bad else None}
    )
    result = manager.generate(0)
    assert indexes(result) == [0, 2]
    assert (
        result.metrics["rollout/dropped_groups"] == 1
        and result.metrics["rollout/failed_samples"] == 2
        and result.metrics["rollout/prompts"] == 3
    )
    assert indexes(manager.generate(1)) == [3, 4]


def check_ids(tokenizer, row) -> list[int]:
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_if_every_request_fails_the_run_ends_with_the_last_error(start_manager):
    manager, engine = start_manager(engine_options={"fault_for": lambda _: Fault(status=418)})
    with pytest.raises(RunError, match="all 4 samples failed. Last error: EngineError: .*HTTP 418") as raised:
        manager.generate(5)
    assert raised.value.__notes__ == ["in rollout 5"]
    assert len(engine.requests) == 12  # each sample: once, and two regenerations


def test_failures_end_at_the_bound_on_prompts(start_manager, tokenizer):
    good = check_ids(tokenizer, digits_row(0))
    faults = {"fault_for": lambda body: None if body["input_ids"] == good else Fault(status=400)}
    rows = [digits_row(0), digits_row(1), digits_row(2)]
    manager, _ = start_manager(rows, dynamic_sampling_max_draws=2, engine_options=faults)
    assert indexes(manager.generate(0)) == [0, 3]  # 1 and 2 failed; prompt 3 is the good row again
    manager, _ = start_manager(rows, dynamic_sampling_max_draws=1, engine_options=faults)
    with pytest.raises(
        RunError,
        match=(
            r"of 2 prompts only 1 of 2 groups could be kept .*Dropped: failed 1. Last failure: EngineError: .*HTTP 400"
        ),
    ):
        manager.generate(0)


def test_empty_responses_are_failures(start_manager):
    manager, _ = start_manager(script=lambda _: ([], []))
    with pytest.raises(RunError, match="the engine gave no token"):
        manager.generate(0)


def test_dynamic_sampling_draws_until_the_rollout_is_full(start_manager):
    manager, _ = start_manager(
        dynamic_sampling_filter_path=f"{HERE}.keep_even_prompts", rollout_batch_size=2, over_sampling_batch_size=5
    )
    result = manager.generate(0)
    assert indexes(result) == [0, 2]  # 4 was kept too, and is surplus
    metrics = result.metrics
    assert (metrics["rollout/prompts"], metrics["rollout/filtered_groups"], metrics["rollout/surplus_groups"]) == (
        5,
        2,
        1,
    )
    assert metrics["rollout/filtered_groups/filtered"] == 2
    assert indexes(manager.generate(1)) == [6, 8]


def test_the_built_in_filter_drops_groups_that_teach_nothing(start_manager, sorting_script):
    calls = {}

    def script(prompt):
        """Prompt '0001': one sample right, the other wrong. Every other prompt: all right."""
        ids, logprobs = sorting_script(prompt)
        key = tuple(ids)
        calls[key] = calls.get(key, 0) + 1
        return (ids[1:], logprobs[1:]) if ids[3] == ids[0] + 1 and calls[key] % 2 else (ids, logprobs)

    manager, _ = start_manager(
        script=script,
        rollout_batch_size=1,
        dynamic_sampling_filter_path="slime_like.rollout.filters.reward_nonzero_std",
    )
    result = manager.generate(0)
    assert result.groups[0].prompt.label == "0001" and sorted(result.groups[0].rewards) == [0, 1]
    assert result.metrics["rollout/filtered_groups/all_rewards_1"] == 1


def test_a_filter_that_keeps_nothing_ends_at_the_bound_with_its_reasons(start_manager):
    manager, engine = start_manager(dynamic_sampling_filter_path=f"{HERE}:keep_nothing", dynamic_sampling_max_draws=3)
    with pytest.raises(
        RunError,
        match=(
            r"of 6 prompts only 0 of 2 groups could be kept \(--dynamic-sampling-max-draws 3\). Dropped:"
            r" filter/too_easy 6"
        ),
    ):
        manager.generate(0)
    assert len(engine.requests) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [("bad_filter", "the filter gave 'yes'"), ("raising_filter", "the filter raised RuntimeError: broken filter")],
)
def test_a_bad_filter_is_named(start_manager, name, message):
    manager, _ = start_manager(dynamic_sampling_filter_path=f"{HERE}.{name}")
    with pytest.raises(RunError, match=f"--dynamic-sampling-filter-path {HERE}.{name}, prompt [01]: {message}"):
        manager.generate(0)
