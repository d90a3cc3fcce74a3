"""Rewards by name and by a user's function, and what happens when one raises, hangs or gives nonsense."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from slime_like.config.base import PluginArgs
from slime_like.config.reward import REWARD_TYPES, RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.errors import ConfigError, RewardError
from slime_like.records import COMPLETED, TRUNCATED, Prompt, Sample
from slime_like.rollout.rewards.instructions import KIND
from slime_like.rollout.rewards.math_answers import SCORERS
from slime_like.rollout.rewards.scorer import IN_PROCESS, IN_WORKER, REMOTE, RewardScorer
from slime_like.utils.user_functions import load_function

PROMPT = Prompt(index=7, text="What is 6 x 7?", tokens=np.array([1, 2], dtype=np.int32))


def make_sample(response="42", label="42", status=COMPLETED) -> Sample:
    return Sample(
        prompt_index=7,
        sample_index=2,
        tokens=np.array([1, 2, 3, 4], dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], dtype=np.int8),
        engine_logprobs=np.zeros(4, dtype=np.float32),
        weight_versions=np.full(4, -1, dtype=np.int32),
        response=response,
        label=label,
        status=status,
    )


class FixedModel:
    """A reward model that thinks little of long responses."""

    async def score(self, prompt, sample):
        assert prompt is PROMPT
        return 1.0 - len(sample.response)


def score(*samples, function=None, model=None, group=False, evaluation=False, **options):
    """(rewards, unscorable samples) of the samples, or the error. group: all in one call, as with --group-rm."""
    path = f"tests.unit.rollout.user_functions.{function}" if function else None
    config = RewardConfig(custom_rm_path=path, **options)
    loaded = load_function(path, num_positional=2, flag="--custom-rm-path") if path else None
    scorer = RewardScorer(config, loaded, PluginArgs(RolloutConfig(rollout_max_response_len=8)), model)

    async def run():
        try:
            if group:
                return [sample.reward for sample in await scorer.score_group(samples, PROMPT, evaluation=evaluation)]
            return [(await scorer.score(sample, PROMPT, evaluation=evaluation)).reward for sample in samples]
        finally:
            await scorer.close()

    return asyncio.run(run()), scorer.num_unscorable


def test_the_known_names_are_those_of_the_flag():
    assert set(REWARD_TYPES) == {*IN_PROCESS, *IN_WORKER, KIND, REMOTE}
    assert set(IN_WORKER) == set(SCORERS)
    with pytest.raises(
        ConfigError,
        match="--rm-type maths is unknown. Known: math, math_strict, deepscaler, deepscaler_strict, dapo, exact, f1",
    ):
        RewardScorer(RewardConfig(rm_type="maths"), None, None)


def test_exact_wants_the_whole_answer_and_the_end():
    samples = [
        make_sample(),
        make_sample(" 42\n"),
        make_sample("42!"),
        make_sample(status=TRUNCATED),
        make_sample("42", 42),
    ]
    assert score(*samples, rm_type="exact") == ([1, 1, 0, 0, 1], 0)


def test_math_scores_in_a_process():
    samples = [make_sample("so it is \\boxed{42}"), make_sample("it is 41"), make_sample("", "42")]
    assert score(*samples, rm_type="math") == ([1, 0, 0], 0)


@pytest.mark.slow
def test_a_response_that_takes_for_ever_scores_0_and_is_counted():
    endless = make_sample("\\boxed{7^{9^{9^{9}}}}")
    start = time.monotonic()
    rewards, unscorable = score(endless, make_sample("\\boxed{42}"), rm_type="math", reward_timeout_s=1.0)
    assert rewards == [0, 1]  # the next one is scored by a new process
    assert unscorable == 1 and time.monotonic() - start < 20


def test_a_built_in_reward_without_a_label_names_the_flag():
    for name in {*REWARD_TYPES} - {KIND, REMOTE}:
        with pytest.raises(RewardError, match="prompt 7, sample 2 has none. Fix: --label-key"):
            score(make_sample(label=None), rm_type=name)


def test_user_functions_plain_async_and_with_a_key():
    assert score(make_sample(), function="length_reward") == ([0.25], 0)
    assert score(make_sample(), function="async_dict_reward", reward_key="other") == ([1.0], 0)


def test_evaluations_may_have_a_key_of_their_own():
    keys = {"reward_key": "other", "eval_reward_key": "score"}
    assert score(make_sample(), function="async_dict_reward", **keys) == ([1.0], 0)
    assert score(make_sample(), function="async_dict_reward", evaluation=True, **keys) == ([0.25], 0)
    assert score(make_sample(), function="async_dict_reward", evaluation=True, reward_key="other") == ([1.0], 0)


def test_a_rule_and_a_model_add_up_with_the_models_weight():
    assert score(make_sample(), make_sample("4"), model=FixedModel(), reward_model_weight=0.5) == ([-0.5, 0.0], 0)
    assert score(make_sample(), make_sample("4"), model=FixedModel(), rm_type="exact", reward_model_weight=0.5) == (
        [0.5, 0.0],
        0,
    )
    config = RewardConfig(rm_type="exact", reward_model_weight=0.5)
    scored = asyncio.run(RewardScorer(config, None, None, FixedModel()).score(make_sample(), PROMPT))
    assert scored.reward_parts == {"rule": 1.0, "model": -1.0}
    assert (
        asyncio.run(RewardScorer(RewardConfig(rm_type="exact"), None, None).score(make_sample(), PROMPT)).reward_parts
        == {}
    )


def test_a_group_function_sees_all_samples_of_a_prompt():
    group = [make_sample("7"), make_sample("7777"), make_sample("77")]
    together = {"group": True, "group_rm": True, "function": "rank_rewards"}
    assert score(*group, **together) == ([1.0, 3.0, 2.0], 0)
    assert score(*group, model=FixedModel(), **together) == ([1.0, 0.0, 1.0], 0)
    assert score(
        *group, group=True, group_rm=True, function="dict_rewards", reward_key="a", eval_reward_key="b", evaluation=True
    ) == ([2.0, 2.0, 2.0], 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("length_reward", "raised AttributeError"),
        ("nan_reward", "gave nan; with --group-rm it must give a list of 2 rewards, one a sample: prompt 7"),
        ("one_short_rewards", r"gave \[1.0\]; with --group-rm it must give a list of 2 rewards"),
        ("nan_rewards", "gave nan, which is no finite number: prompt 7"),
    ],
)
def test_a_bad_group_function_is_named(function, message):
    with pytest.raises(RewardError, match=message):
        score(make_sample(), make_sample(), group=True, group_rm=True, function=function)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "raising_reward",
            {},
            "raised ValueError: no such answer: prompt 7, sample 2, label 'gold', response starts 'my answer'",
        ),
        ("async_raising_reward", {}, "raised KeyError: 'gold': prompt 7"),
        ("exiting_reward", {}, "raised RuntimeError: SystemExit: 3"),
        ("timeout_raising_reward", {}, "raised TimeoutError: the judge is slow"),
        ("writing_reward", {}, "raised AttributeError: args is read-only"),
        ("nan_reward", {}, "gave nan, which is no finite number"),
        ("text_reward", {}, "gave '1.0', which is no finite number"),
        ("none_reward", {}, "gave None, which is no finite number"),
        ("async_dict_reward", {}, r"gave a dict with the keys \['other', 'score'\]. Fix: name one with --reward-key"),
        ("async_dict_reward", {"reward_key": "acc"}, "gave a dict without --reward-key 'acc'"),
        ("length_reward", {"reward_key": "acc"}, "--reward-key acc needs a dict"),
    ],
)
def test_a_bad_user_function_names_itself_and_the_sample(function, options, message):
    with pytest.raises(RewardError, match=message) as raised:
        score(make_sample("my answer", "gold"), function=function, **options)
    assert f"tests.unit.rollout.user_functions.{function}" in str(raised.value)
    if "raised ValueError" in message:
        assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("function", ["sleeping_reward", "blocking_async_reward"])
def test_a_hanging_user_function_meets_its_deadline(function):
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"gave no reward within 0.3 s \(--reward-timeout-s\): prompt 7, sample 2"):
        score(make_sample(), function=function, reward_timeout_s=0.3)
    assert time.monotonic() - start < 3


def score_of_row(own: str | None, response: str, **options) -> float:
    config = RewardConfig(**({"rm_type": "exact"} | options))
    scorer = RewardScorer(config, None, PluginArgs(RolloutConfig()))
    prompt = dataclasses.replace(PROMPT, metadata={"rm_type": own} if own else {})

    async def run():
        try:
            return (await scorer.score(make_sample(response=response), prompt)).reward
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_a_row_may_have_a_reward_of_its_own():
    assert score_of_row(None, "it is 42") == 0 and score_of_row("f1", "it is 42") == 0.5
    assert score_of_row("math", "it is 42") == 1 and score_of_row("dapo", "it is 42") == -1


def test_a_row_with_a_reward_that_there_is_not_is_named():
    for own in ("f2", 7):
        with pytest.raises(RewardError, match=f"prompt 7, sample 2: its rm_type: --rm-type {own} is unknown"):
            score_of_row(own, "42")


def test_a_box_before_any_reward():
    assert score_of_row("boxed_exact", "it is \\boxed{42}, or 43") == 1
    assert score_of_row("boxed_f1", "it is \\boxed{42 and 43}") == 0.5
    assert score_of_row("boxed_exact", "42") == 0  # no box, no answer
    assert score_of_row(None, "\\boxed{42}", rm_type="boxed_math") == 1


def test_names_of_rewards_are_checked():
    for name in ("math", "boxed_math", "boxed_remote_rm", "gpqa"):
        problems = RewardConfig(rm_type=name, rm_url="http://x").problems()
        assert not [problem for problem in problems if "--rm-type" in problem]
    (problem,) = RewardConfig(rm_type="random").problems()
    assert problem.startswith("--rm-type random is refused: ") and "Fix: --custom-rm-path" in problem
    assert "is unknown" in RewardConfig(rm_type="boxed_nothing").problems()[0]
    assert RewardConfig(rm_type="dapo", reward_key="score").problems() == []
    assert RewardConfig(rm_type="dapo", reward_key="acc").problems() != []
