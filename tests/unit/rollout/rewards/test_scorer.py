"""Rewards by name and by a user's function, and what happens when one raises, hangs or gives nonsense."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from slime_like.config.base import PluginArgs
from slime_like.config.rollout import REWARD_TYPES, RewardConfig, RolloutConfig
from slime_like.errors import ConfigError, RewardError
from slime_like.records import COMPLETED, TRUNCATED, Sample
from slime_like.rollout.rewards.math_answers import SCORERS
from slime_like.rollout.rewards.scorer import IN_PROCESS, IN_WORKER, RewardScorer
from slime_like.utils.plugins import load_function


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


def score(*samples, function=None, **options):
    """(rewards, unscorable samples) of the samples, or the error."""
    path = f"tests.unit.rollout.user_functions.{function}" if function else None
    config = RewardConfig(custom_rm_path=path, **options)
    loaded = load_function(path, num_positional=2, flag="--custom-rm-path") if path else None
    scorer = RewardScorer(config, loaded, PluginArgs(RolloutConfig(rollout_max_response_len=8)))

    async def run():
        try:
            return [(await scorer.score(sample)).reward for sample in samples]
        finally:
            await scorer.close()

    return asyncio.run(run()), scorer.num_unscorable


def test_the_known_names_are_those_of_the_flag():
    assert set(REWARD_TYPES) == {*IN_PROCESS, *IN_WORKER}
    assert set(IN_WORKER) == set(SCORERS)
    with pytest.raises(ConfigError, match="--rm-type maths is unknown. Known: math, deepscaler, exact"):
        RewardScorer(RewardConfig(rm_type="maths"), None, None)


def test_exact_wants_the_whole_answer_and_the_end():
    samples = [make_sample(), make_sample(" 42\n"), make_sample("42!"), make_sample(status=TRUNCATED), make_sample("42", 42)]
    assert score(*samples, rm_type="exact") == ([1, 1, 0, 0, 1], 0)


def test_math_scores_in_a_process():
    samples = [make_sample("so it is \\boxed{42}"), make_sample("it is 41"), make_sample("", "42")]
    assert score(*samples, rm_type="math") == ([1, 0, 0], 0)


def test_a_response_that_takes_for_ever_scores_0_and_is_counted():
    endless = make_sample("\\boxed{7^{9^{9^{9}}}}")
    start = time.monotonic()
    rewards, unscorable = score(endless, make_sample("\\boxed{42}"), rm_type="math", reward_timeout_s=1.0)
    assert rewards == [0, 1]  # the next one is scored by a new process
    assert unscorable == 1 and time.monotonic() - start < 20


def test_a_built_in_reward_without_a_label_names_the_flag():
    for name in REWARD_TYPES:
        with pytest.raises(RewardError, match="prompt 7, sample 2 has none. Fix: --label-key"):
            score(make_sample(label=None), rm_type=name)


def test_user_functions_plain_async_and_with_a_key():
    assert score(make_sample(), function="length_reward") == ([0.25], 0)
    assert score(make_sample(), function="async_dict_reward", reward_key="other") == ([1.0], 0)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("raising_reward", {}, "raised ValueError: no such answer: prompt 7, sample 2, label 'gold', response starts 'my answer'"),
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
