"""The functions of scripts/examples/hooks.py in whole rollouts on a scripted engine, and what happens to bad ones."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.examples import hooks as examples
from slime_like.errors import PluginError, RunError
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from slime_like.rollout.train_samples import train_samples_of
from tests.unit.rollout import bad_hooks
from tests.unit.rollout.rows import digits_row, indexes

EXAMPLES, BAD = "scripts.examples.hooks.", "tests.unit.rollout.bad_hooks."
LENGTHS = {"custom_rm_path": "tests.unit.rollout.user_functions.length_reward", "rm_type": None}


def trained_tokens(result) -> list[int]:
    return [sample.num_response_tokens for group in result.groups for sample in group.samples]


@pytest.fixture
def one_long_answer(tokenizer):
    """The first answer to each prompt has three tokens, the second five (end token included)."""
    asked: dict[tuple[int, ...], int] = {}

    def answer(prompt: list[int]):
        count = asked[tuple(prompt)] = asked.get(tuple(prompt), -1) + 1
        ids = tokenizer("12" if count % 2 == 0 else "1234", add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id], [-0.5] * (len(ids) + 1)

    return answer


def test_a_sample_filter_says_what_trains_and_leaves_the_baseline(start_manager, one_long_answer):
    manager, _ = start_manager(
        script=one_long_answer, rollout_sample_filter_path=EXAMPLES + "train_shorter_half", **LENGTHS
    )
    result = manager.generate(0)
    assert sorted(trained_tokens(result)) == [0, 0, 3, 3] and result.metrics["rollout/untrained_samples"] == 2
    assert all(sorted(group.rewards.tolist()) == [3 / 8, 5 / 8] for group in result.groups)


def test_all_groups_are_seen_also_those_that_a_filter_dropped(start_manager):
    examples.seen_groups.clear()
    manager, _ = start_manager(
        rollout_all_samples_process_path=EXAMPLES + "remember_all",
        dynamic_sampling_filter_path="tests.unit.rollout.user_functions.keep_even_prompts",
    )
    assert indexes(manager.generate(0)) == [0, 2]
    assert examples.seen_groups[:3] == [0, 1, 2] and len(examples.seen_groups) >= 3


def test_a_buffer_filter_chooses_among_what_is_ready(start_manager):
    manager, _ = start_manager(
        over_sampling_batch_size=4, buffer_filter_path=BAD + "last_prompts", rollout_batch_size=2
    )
    result = manager.generate(0)
    assert indexes(result) == [2, 3] and result.metrics["rollout/surplus_groups"] == 2
    assert indexes(manager.generate(1)) == [6, 7]


def test_the_example_buffer_filter_takes_the_most_varied():
    groups = [bad_hooks.group(index, rewards) for index, rewards in enumerate([[0, 0], [0, 1], [0.4, 0.6]])]
    assert [group.prompt.index for group in examples.most_varied(None, groups, 2)] == [1, 2]


def test_rewards_processed_by_the_user_are_the_advantages(make_config):
    config = make_config(custom_reward_post_process_path=EXAMPLES + "centered_over_the_rollout")
    samples = train_samples_of(config, [bad_hooks.group(0, [1, 0]), bad_hooks.group(1, [1, 1])])
    assert [float(sample.advantages[-1]) for sample in samples] == [0.25, -0.75, 0.25, 0.25]
    assert [sample.reward for sample in samples] == [0.25, -0.75, 0.25, 0.25]
    ours = train_samples_of(make_config(), [bad_hooks.group(0, [1, 0]), bad_hooks.group(1, [1, 1])])
    assert [float(sample.advantages[-1]) for sample in ours[2:]] == [0, 0]  # what it takes the place of


def test_train_samples_of_ones_own(make_config):
    config = make_config(custom_convert_samples_to_train_data_path=EXAMPLES + "best_of_group")
    samples = train_samples_of(config, [bad_hooks.group(0, [1, 0]), bad_hooks.group(1, [0.2, 0.4])])
    assert [(sample.prompt_index, sample.sample_index, sample.reward) for sample in samples] == [
        (0, 0, 1.0),
        (1, 1, 0.4),
    ]
    assert all(sample.advantages.tolist() == [0, 1, 1] for sample in samples)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_train_samples", "gave \\[1, 2\\]; it must give a list of records.TrainSample"),
        ("short_advantages", "sample 0/0: 3 tokens, but {'advantages': 2}"),
        ("nan_advantages", "sample 0/0: advantages are not finite where it is trained"),
        ("fractional_mask", "sample 0/0: loss_mask must be 0 or 1"),
        ("raising", "the function raised ValueError: mine"),
    ],
)
def test_train_data_that_cannot_be_trained_is_named(make_config, name: str, message: str):
    config = make_config(custom_convert_samples_to_train_data_path=BAD + name)
    with pytest.raises(RunError, match=f"--custom-convert-samples-to-train-data-path {BAD}{name}: {message}"):
        train_samples_of(config, [bad_hooks.group(0, [1, 0])])


def test_a_sample_that_is_not_trained_may_hold_anything_beside_its_mask(make_config):
    config = make_config(custom_convert_samples_to_train_data_path=BAD + "nan_in_the_prompt")
    assert np.isnan(train_samples_of(config, [bad_hooks.group(0, [1, 0])])[0].engine_logprobs[0])


@pytest.mark.parametrize("name", ["one_number", "nan_numbers", "texts"])
def test_processed_rewards_must_be_a_number_each(make_config, name: str):
    config = make_config(custom_reward_post_process_path=BAD + name)
    with pytest.raises(RunError, match=f"--custom-reward-post-process-path {BAD}{name}: gave"):
        train_samples_of(config, [bad_hooks.group(0, [1, 0])])


def test_log_functions_add_metrics_and_see_ours(start_manager, write_rows):
    held_out = write_rows([digits_row(9876)], "held-out.jsonl")
    manager, _ = start_manager(
        custom_rollout_log_function_path=EXAMPLES + "vocabulary_used",
        custom_eval_rollout_log_function_path=EXAMPLES + "best_of_eval",
        eval_prompt_data=["held", held_out],
        eval_interval=1,
    )
    metrics = manager.generate(0).metrics
    assert metrics["rollout/different_tokens"] == 3 and metrics["rollout/reward_mean"] == 1  # 0, 1 and the end token
    assert manager.evaluate(0)["eval/held/reward_max"] == 1.0


def test_a_log_function_may_give_nothing(start_manager):
    manager, _ = start_manager(custom_rollout_log_function_path=BAD + "true_as_slime_has_it")
    assert manager.generate(0).metrics["rollout/reward_mean"] == 1


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("rollout_sample_filter_path", "one_number", "it must give"),
        ("rollout_sample_filter_path", "numbers_for_bools", "1 is no bool"),
        ("rollout_sample_filter_path", "raising", "the function raised ValueError: mine"),
        ("rollout_all_samples_process_path", "raising3", "the function raised ValueError: mine"),
        ("custom_rollout_log_function_path", "text_metric", "the metric 'x' is 'many', no number"),
    ],
)
def test_a_bad_function_ends_the_rollout_and_is_named(start_manager, flag: str, name: str, message: str):
    manager, _ = start_manager(**{flag: BAD + name})
    with pytest.raises(RunError, match=f"--{flag.replace('_', '-')} {BAD}{name}: .*{message}"):
        manager.generate(0)


@pytest.mark.parametrize("name", ["same_group_twice", "too_few_groups", "foreign_group", "numbers"])
def test_a_buffer_filter_must_give_as_many_of_the_groups(start_manager, name: str):
    manager, _ = start_manager(over_sampling_batch_size=4, buffer_filter_path=BAD + name)
    with pytest.raises(RunError, match=f"--buffer-filter-path {BAD}{name}: gave .*it must give 2 different ones of"):
        manager.generate(0)


@pytest.mark.parametrize(
    "flag",
    [
        "rollout_function_path",
        "eval_function_path",
        "buffer_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
        "custom_reward_post_process_path",
        "custom_convert_samples_to_train_data_path",
        "custom_rollout_log_function_path",
        "custom_eval_rollout_log_function_path",
    ],
)
def test_each_path_is_checked_at_the_start(make_config, flag: str):
    with pytest.raises(PluginError, match=f"--{flag.replace('_', '-')} {BAD}no_arguments: will be called with"):
        load_rollout_plugins(make_config(**{flag: BAD + "no_arguments"}))


def test_a_filter_without_anything_to_choose_from_is_refused(make_config):
    assert any(
        "--buffer-filter-path has nothing to choose" in p for p in make_config(buffer_filter_path="a.b").problems()
    )
    fine = make_config(buffer_filter_path="a.b", over_sampling_batch_size=4)
    assert fine.problems() == make_config().problems()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"custom_convert_samples_to_train_data_path": "a.b", "custom_reward_post_process_path": "a.b"},
            "does not go with --custom-reward-post-process-path",
        ),
        ({"custom_convert_samples_to_train_data_path": "a.b", "mask_truncated_samples": True}, "it does not go with"),
        (
            {"custom_reward_post_process_path": "a.b", "custom_advantage_function_path": "a.b"},
            "both say what samples are pushed by",
        ),
        (
            {"loss_type": "sft_loss", "rollout_function_path": "a.b"},
            "--rollout-function-path: this run samples nothing",
        ),
        (
            {"loss_type": "sft_loss", "custom_reward_post_process_path": "a.b"},
            "--custom-reward-post-process-path: supervised rows have no rewards",
        ),
        ({"eval_function_path": "a.b"}, "--eval-function-path does nothing without --eval-interval"),
        ({"loss_type": "sft_loss", "log_passrate": True}, "--log-passrate: about sampled responses"),
        ({"log_samples": -1}, "--log-samples -1: must not be negative"),
    ],
)
def test_what_would_do_nothing_is_refused(make_config, options: dict, message: str):
    assert any(message in problem for problem in make_config(**options).problems())
    assert not any(message in problem for problem in make_config().problems())
