"""Functions as a user would write them, good and bad; found by their dotted path."""

from __future__ import annotations

import asyncio
import time

from slime_like.rollout.sample_builder import SampleBuilder

answers: list[int] = []  # prompts that first_sample_untrained was asked


def length_reward(args, sample):
    return sample.num_response_tokens / args.rollout_max_response_len


async def async_dict_reward(args, sample):
    await asyncio.sleep(0)
    return {"score": 0.25, "other": 1}


def raising_reward(args, sample):
    raise ValueError("no such answer")


async def async_raising_reward(args, sample):
    raise KeyError("gold")


def exiting_reward(args, sample):
    raise SystemExit(3)


def timeout_raising_reward(args, sample):
    raise TimeoutError("the judge is slow")


def sleeping_reward(args, sample):
    time.sleep(30)


async def blocking_async_reward(args, sample):
    time.sleep(30)


def nan_reward(args, sample):
    return float("nan")


def text_reward(args, sample):
    return "1.0"


def none_reward(args, sample):
    return None


def rank_rewards(args, samples):
    """Place by length, the shortest first."""
    lengths = sorted(len(sample.response) for sample in samples)
    return [lengths.index(len(sample.response)) + 1 for sample in samples]


async def dict_rewards(args, samples):
    return [{"a": 1, "b": 2} for _ in samples]


def one_short_rewards(args, samples):
    return [1.0] * (len(samples) - 1)


def nan_rewards(args, samples):
    return [float("nan")] * len(samples)


def one_argument(sample):
    return 1.0


def writing_reward(args, sample):
    args.rollout_batch_size = 1


def keep_even_prompts(args, samples):
    return samples[0].prompt_index % 2 == 0


def keep_nothing(args, samples):
    return False, "too_easy"


def bad_filter(args, samples):
    return "yes"


def raising_filter(args, samples):
    raise RuntimeError("broken filter")


async def ask_twice(args, prompt, sampling_params, engine):
    """Throws the first answer away."""
    from slime_like.rollout.sample_builder import SampleBuilder

    await engine.generate(prompt.tokens, sampling_params)
    return SampleBuilder(prompt, 0).generated(await engine.generate(prompt.tokens, sampling_params)).finish()


async def first_sample_untrained(args, prompt, sampling_params, engine):
    """The first of two samples saw no answer of its own worth training on: a tool that failed, an answer without an
    end.
    """
    import dataclasses

    import numpy as np

    from slime_like.rollout.sample_builder import SampleBuilder

    sample = SampleBuilder(prompt, 0).generated(await engine.generate(prompt.tokens, sampling_params)).finish()
    answers.append(prompt.index)
    return (
        dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        if answers.count(prompt.index) % 2
        else sample
    )


async def two_segments(args, prompt, sampling_params, engine):
    """One answer in two samples, as a context that was cut and begun anew gives them."""
    from slime_like.rollout.sample_builder import SampleBuilder

    return [
        SampleBuilder(prompt).generated(await engine.generate(prompt.tokens, sampling_params)).finish()
        for _ in range(2)
    ]


def sample_number(args, sample):
    return float(sample.sample_index)


async def no_sample(args, prompt, sampling_params, engine):
    return "hello"


async def raising_generate(args, prompt, sampling_params, engine):
    raise ValueError("my own bug")


NOT_A_FUNCTION = 3


def reward_that_hates_two(args, sample):
    """Raises for the row whose digits end with 2."""
    if sample.label.endswith("2"):
        raise ValueError("no such answer")
    return 1.0


async def generates_but_not_two(args, prompt, sampling_params, engine):
    """As the engine answers; raises for the row whose digits end with 2."""
    if prompt.label.endswith("2"):
        raise ValueError("no such tool")
    return SampleBuilder(prompt, 0).generated(await engine.generate(prompt.tokens, sampling_params)).finish()


def group_reward_that_hates_two(args, samples):
    """As reward_that_hates_two, for --group-rm."""
    return [reward_that_hates_two(args, sample) for sample in samples]


def no_sevens(args, samples) -> tuple[bool, str]:
    """Of seven prompts one is not trained on."""
    return samples[0].prompt_index % 7 != 3, "seventh"
