"""The rollout side from end to end on a scripted engine."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from slime_like.config.loss import LossConfig
from slime_like.errors import CheckpointError, DataError, PluginError, RewardError, RunError
from slime_like.records import COMPLETED, WeightsRef
from slime_like.rollout.check_data import check_data
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.rollout.train_samples import to_train_samples
from slime_like.testing.scripted_engine import Fault
from tests.unit.rollout.rows import digits_row, indexes

HERE = "tests.unit.rollout.user_functions"


def test_a_rollout_is_groups_in_order_scored_and_measured(start_manager):
    manager, engine = start_manager()
    engine.weight_version = "3"
    result = manager.generate(0)
    assert indexes(result) == [0, 1]
    for group in result.groups:
        assert [sample.sample_index for sample in group.samples] == [0, 1]
        for sample in group.samples:
            assert sample.response == group.prompt.label and sample.reward == 1.0 and sample.status == COMPLETED
            assert set(sample.weight_versions.tolist()) == {-1, 3}
    metrics = result.metrics
    assert (
        metrics["rollout/reward_mean"] == 1
        and metrics["rollout/reward_std"] == 0
        and metrics["rollout/zero_std_groups"] == 2
    )
    assert (
        metrics["rollout/response_tokens_mean"] == 5
        and metrics["rollout/tokens"] == 20
        and metrics["rollout/truncated_ratio"] == 0
    )
    assert metrics["rollout/failed_samples"] == metrics["rollout/dropped_groups"] == 0
    assert metrics["rollout/seconds"] > 0 and metrics["rollout/tokens_per_second"] == pytest.approx(
        20 / metrics["rollout/seconds"]
    )
    json.dumps(metrics, allow_nan=False)
    assert indexes(manager.generate(1)) == [2, 3]
    assert len(engine.requests) == 8


def test_a_response_that_is_cut_is_truncated_and_earns_nothing(start_manager):
    manager, _ = start_manager(rollout_max_response_len=4)  # the end token does not fit
    metrics = manager.generate(0).metrics
    assert metrics["rollout/truncated_ratio"] == 1 and metrics["rollout/reward_mean"] == 0


def test_resume_in_the_middle_of_an_epoch_draws_what_would_have_come(start_manager):
    whole, _ = start_manager(rollout_shuffle=True, rollout_batch_size=3)
    labels = [[group.prompt.label for group in whole.generate(step).groups] for step in range(4)]
    first, _ = start_manager(rollout_shuffle=True, rollout_batch_size=3)
    for step in (0, 1):
        first.trained([group.prompt.index for group in first.generate(step).groups])
    lost = first.generate(2)  # taken, and not trained on when the state was saved
    second, _ = start_manager(rollout_shuffle=True, rollout_batch_size=3)
    second.load_state_dict(json.loads(json.dumps(first.snapshot()[0])))
    assert [[group.prompt.label for group in second.generate(step).groups] for step in (2, 3)] == labels[2:]
    assert labels[2] == [group.prompt.label for group in lost.groups]
    other, _ = start_manager([digits_row(1)])
    with pytest.raises(CheckpointError):
        other.load_state_dict(first.snapshot()[0])


def test_a_rollout_that_was_generated_ahead_is_taken_after_a_resume_and_no_prompt_twice(start_manager, tmp_path):
    whole, _ = start_manager()
    rollouts = [whole.generate(step) for step in range(4)]
    first, _ = start_manager()
    first.trained(indexes(first.generate(0)))
    assert first.ahead(1, wait=True) is None  # it has not begun
    first.begin(1)
    ahead = first.ahead(1, wait=True)
    assert ahead is not None and indexes(ahead) == indexes(rollouts[1])
    state = json.loads(json.dumps(first.snapshot()[0]))
    save_rollout(str(tmp_path / "ahead.npz"), 1, ahead.groups)
    second, engine = start_manager()
    second.load_state_dict(state)
    second.put_ahead(1, load_rollout(str(tmp_path / "ahead.npz"), 1), ahead.metrics)
    second.begin(2)  # as the loop does before it trains
    for step in (1, 2, 3):
        result = second.generate(step)
        assert indexes(result) == indexes(rollouts[step])
        second.trained(indexes(result))
    assert len(engine.requests) == 8, "rollout 1 was not asked for again"
    counts = second.snapshot()[0]["data"]
    assert (counts["position"], counts["trained"], counts["open"], counts["waiting"]) == (8, 8, {}, [])


def test_a_raising_reward_names_the_sample_and_cancels_the_rest(start_manager):
    manager, _ = start_manager(custom_rm_path=f"{HERE}.raising_reward", rm_type=None)
    with pytest.raises(RewardError, match="raised ValueError: no such answer: prompt [01], sample 0"):
        manager.generate(0)


@pytest.mark.parametrize(
    "functions",
    [
        {"custom_rm_path": f"{HERE}.reward_that_hates_two", "rm_type": None},
        {"custom_rm_path": f"{HERE}.group_reward_that_hates_two", "rm_type": None, "group_rm": True},
        {"custom_generate_function_path": f"{HERE}.generates_but_not_two"},
    ],
    ids=["reward", "group reward", "generate function"],
)
def test_errors_may_cost_their_prompt_alone(start_manager, functions):
    manager, _ = start_manager(**functions, on_reward_error="drop", reward_error_tries=2)
    results = [manager.generate(step) for step in range(5)]  # seven rows: the second epoch begins in the fourth
    assert [indexes(result) for result in results] == [[0, 1], [3, 4], [5, 6], [7, 8], [10, 11]]
    assert [result.metrics["rollout/user_errors"] for result in results] == [0, 2, 0, 0, 0]
    assert [result.metrics["rollout/put_aside_rows"] for result in results] == [0, 1, 1, 1, 1]
    assert results[1].metrics["rollout/ledger/dropped"] == 1


def test_an_evaluation_counts_errors_as_failed_samples(start_manager, write_rows):
    evals = [str(part) for part in ("seven", write_rows([digits_row(n) for n in range(4)], "eval.jsonl"))]
    functions = {"custom_rm_path": f"{HERE}.reward_that_hates_two", "rm_type": None}
    manager, _ = start_manager(**functions, on_reward_error="drop", eval_prompt_data=evals)
    metrics = manager.evaluate(0)
    assert metrics["eval/seven/failed_samples"] == 1 and metrics["eval/seven/reward_mean"] == 0.75


def test_a_custom_generate_function_is_used(start_manager):
    manager, engine = start_manager(custom_generate_function_path=f"{HERE}.ask_twice")
    result = manager.generate(0)
    assert len(engine.requests) == 8
    assert [(sample.prompt_index, sample.sample_index) for group in result.groups for sample in group.samples] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_sample_with_an_empty_mask_is_kept_and_scored(start_manager):
    manager, _ = start_manager(custom_generate_function_path=f"{HERE}.first_sample_untrained")
    result = manager.generate(0)
    assert result.metrics["rollout/untrained_samples"] == 2 and result.metrics["rollout/failed_samples"] == 0
    assert result.metrics["rollout/reward_mean"] == 1 and result.metrics["rollout/response_tokens_mean"] == 2.5
    samples = to_train_samples(result.groups, LossConfig())
    assert len(samples) == 4 and sorted(int(sample.loss_mask.sum()) for sample in samples) == [0, 0, 5, 5]


def test_long_responses_are_punished_in_training_only(start_manager, write_rows):
    """Five tokens of at most 6, of which the last 4 are the buffer: eq. 13 gives (6 - 4 - 5) / 4 = -0.75."""
    held_out = write_rows([digits_row(9876)], "held-out.jsonl")
    options = {"rollout_max_response_len": 6, "overlong_buffer_len": 4, "overlong_penalty_factor": 2.0}
    manager, _ = start_manager(**options, eval_prompt_data=["held_out", held_out], eval_interval=1)
    metrics = manager.generate(0).metrics
    assert metrics["rollout/reward_mean"] == -0.5 and metrics["reward/overlong"] == -1.5 and metrics["reward/rule"] == 1
    evaluation = manager.evaluate(0)
    assert evaluation["eval/held_out/reward_mean"] == 1 and "eval/held_out/reward_overlong" not in evaluation


def test_masked_truncated_samples_are_counted_as_untrained(start_manager):
    for options, count in (({}, 0), ({"mask_truncated_samples": True}, 4)):
        metrics = start_manager(rollout_max_response_len=4, **options)[0].generate(0).metrics
        assert metrics["rollout/untrained_samples"] == count and metrics["rollout/response_tokens_mean"] == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_sample", r"the function gave \['str'\]; it must give one Sample, or a list"),
        ("raising_generate", "the function raised ValueError: my own bug"),
    ],
)
def test_a_bad_custom_generate_function_is_named(start_manager, name, message):
    manager, _ = start_manager(custom_generate_function_path=f"{HERE}.{name}")
    with pytest.raises(RunError, match=f"--custom-generate-function-path, prompt [01], sample [01]: {message}"):
        manager.generate(0)


def test_user_errors_surface_at_start_without_an_engine(make_config):
    def start(**options):
        manager = RolloutManager(
            make_config(**options), EngineAccess(router_url="http://127.0.0.1:9", router_api_key=None, num_engines=1)
        )
        try:
            manager.start()
        finally:
            manager.close()

    start()
    with pytest.raises(PluginError, match="will be called with 2 positional arguments, but its signature is"):
        start(custom_rm_path=f"{HERE}.one_argument", rm_type=None)
    with pytest.raises(DataError, match="--label-key"):
        start(label_key="gold")
    with pytest.raises(DataError, match="cannot be loaded"):
        start(hf_checkpoint="tests")


@pytest.mark.slow
def test_start_generate_leaves_the_driver_free_and_evaluation_runs_beside_it(start_manager, write_rows):
    held_out = write_rows([digits_row(9876)], "held-out.jsonl")
    greedy = {"eval_prompt_data": ["held_out", held_out], "eval_interval": 1, "eval_temperature": 0.0}
    slow = {"fault_for": lambda body: None if body["sampling_params"]["temperature"] == 0 else Fault(delay_s=1.5)}
    manager, _ = start_manager(**greedy, engine_options=slow)
    future = manager.start_generate(0)
    with pytest.raises(RunError, match="asked for while others are still being taken"):
        manager.generate(1)
    assert manager.evaluate(0)["eval/held_out/pass@1"] == 1
    assert not future.done()
    assert indexes(future.result(timeout=5)) == [0, 1]


def test_close_cancels_a_running_rollout(start_manager):
    manager, _ = start_manager(engine_options={"fault_for": lambda _: Fault(delay_s=30)})
    future = manager.start_generate(0)
    time.sleep(0.1)
    start = time.monotonic()
    manager.close()
    assert time.monotonic() - start < 3 and future.cancelled()
    with pytest.raises(RunError, match="not running"):
        manager.generate(1)


def test_num_rollouts_counts_epochs(make_config):
    config = make_config(num_rollout=None, num_epoch=2)
    manager = RolloutManager(config, EngineAccess(router_url="http://127.0.0.1:9", router_api_key=None, num_engines=1))
    manager.start(check_data(config))
    assert check_data(config).num_rollouts(2) == 7  # 14 prompts, 2 a rollout


def test_train_samples_are_normalised_within_their_group(start_manager, sorting_script):
    count = iter(range(100))

    def script(prompt):
        ids, logprobs = sorting_script(prompt)
        return (ids, logprobs) if next(count) < 1 else (ids[1:], logprobs[1:])  # only the very first answer is right

    manager, _ = start_manager(script=script, engine_options={"fault_for": None})
    groups = manager.generate(0).groups
    samples = to_train_samples(groups, LossConfig(disable_grpo_std_normalization=True))
    assert [(sample.prompt_index, sample.sample_index) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(sample.advantages[-1] for sample in samples) == [-0.5, 0, 0, 0.5]
    for group, pair in zip(groups, (samples[:2], samples[2:]), strict=True):
        for sample, train in zip(group.samples, pair, strict=True):
            assert train.tokens is sample.tokens and train.reward == sample.reward
            np.testing.assert_array_equal(train.loss_mask, sample.loss_mask)


@pytest.mark.slow
def test_an_abort_by_our_own_sync_is_no_failure(start_manager):
    """Five aborts of one request are more than any failure may have.

    Nothing is dropped, and every answer is asked for again.
    """
    aborted = []

    def fault(body):
        if len(aborted) < 5 and body["sampling_params"]["sampling_seed"] == first_seed(body, aborted):
            aborted.append(body["sampling_params"]["sampling_seed"])
            return Fault(delay_s=0.3, abort=1)
        return None

    def first_seed(body, before):
        return before[0] if before else body["sampling_params"]["sampling_seed"]

    manager, _ = start_manager(engine_options={"fault_for": fault})
    future = manager.start_generate(0)
    version = 0
    while not future.done():
        manager.policy_changing()
        version += 1
        manager.policy_changed(WeightsRef(version=version))
        time.sleep(0.1)
    result = future.result(timeout=5)
    assert indexes(result) == [0, 1] and all(sample.reward == 1 for group in result.groups for sample in group.samples)
    metrics = result.metrics
    assert (
        metrics["rollout/interrupted_requests"],
        metrics["rollout/failed_requests"],
        metrics["rollout/dropped_groups"],
    ) == (5, 0, 0)


def test_a_request_that_is_aborted_during_a_sync_waits_for_its_end(start_manager):
    manager, engine = start_manager(
        engine_options={"faults": [Fault(abort=1)]}, rollout_batch_size=1, n_samples_per_prompt=1
    )
    manager.policy_changing()
    future = manager.start_generate(0)
    time.sleep(0.5)
    assert len(engine.requests) == 1 and not future.done()
    manager.policy_changed(WeightsRef(version=1))
    assert future.result(timeout=5).metrics["rollout/interrupted_requests"] == 1


def test_segments_of_an_answer_are_one_member_of_their_group(start_manager):
    manager, _ = start_manager(
        custom_generate_function_path=f"{HERE}.two_segments", custom_rm_path=f"{HERE}.sample_number", rm_type=None
    )
    group = manager.generate(0).groups[0]
    assert [(sample.sample_index, sample.segment_index, sample.reward) for sample in group.samples] == [
        (0, 0, 0.0),
        (0, 1, 0.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
    ]
    assert group.rewards.tolist() == [0.0, 1.0]


def test_the_ledger_is_told_in_metrics_and_adds_up(start_manager):
    manager, _ = start_manager(dynamic_sampling_filter_path=f"{HERE}.keep_even_prompts", over_sampling_batch_size=5)
    metrics = manager.generate(0).metrics
    states = {
        name.removeprefix("rollout/ledger/"): value
        for name, value in metrics.items()
        if name.startswith("rollout/ledger/")
    }
    assert states == {"drawn": 0, "in_flight": 0, "ready": 0, "taken": 2, "trained": 0, "dropped": 3, "waiting": 0}
    manager.trained([0, 2])
    assert manager.snapshot()[0]["data"] == {
        **{"position": 5, "trained": 2, "dropped": {"filter/filtered": 2, "surplus": 1}, "open": {}, "waiting": []},
        **{"num_rows": 7, "shuffle": False, "seed": 42},
    }
