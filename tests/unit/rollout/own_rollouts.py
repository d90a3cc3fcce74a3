"""Rollout and evaluation functions, good and bad."""

from __future__ import annotations

import dataclasses

import numpy as np

from slime_like.records import SampleGroup
from slime_like.rollout.generate import Generation
from slime_like.rollout.sample_builder import SampleBuilder


async def built_in_without_the_first(args, step, rollout):
    groups = await rollout.builtin(rollout.num_groups + 1)
    return groups[1:]


async def every_other_put_back(args, step, rollout):
    prompts = rollout.draw(2 * rollout.num_groups)
    rollout.put_back(prompts[1::2])
    return [await rollout.group(prompt) for prompt in prompts[::2]]


def _answer(prompt, text: str):
    generation = Generation(tokens=[5, 6], logprobs=[-0.1, -0.2], text=text, status="completed", weight_version=0)
    return SampleBuilder(prompt).generated(generation).finish()


async def answers_from_a_book(args, step, rollout):
    groups = []
    for place, prompt in enumerate(rollout.draw(rollout.num_groups)):
        sample = await rollout.score(_answer(prompt, prompt.label if place else "wrong"), prompt)
        groups.append(SampleGroup(prompt=prompt, samples=(sample,)))
    return groups


def nothing(args, step, rollout):
    return []


async def text(args, step, rollout):
    rollout.draw(1)
    return "hello"


async def unscored(args, step, rollout):
    return [SampleGroup(prompt=prompt, samples=(_answer(prompt, ""),)) for prompt in rollout.draw(2)]


async def foreign(args, step, rollout):
    group = await rollout.group(rollout.draw(1)[0])
    prompt = dataclasses.replace(group.prompt, index=77)
    samples = tuple(dataclasses.replace(sample, prompt_index=77) for sample in group.samples)
    return [SampleGroup(prompt=prompt, samples=samples)]


async def twice(args, step, rollout):
    group = await rollout.group(rollout.draw(1)[0])
    return [group, group]


async def raising(args, step, rollout):
    rollout.draw(3)
    raise KeyError("mine")


async def text_metrics(args, step, rollout):
    return [await rollout.group(prompt) for prompt in rollout.draw(2)], "many"


async def own_eval_set(args, step, evaluation):
    from slime_like.records import Prompt

    prompt = Prompt(index=0, text="", tokens=np.array([3], dtype=np.int32), label="42")
    sample = await evaluation.score(_answer(prompt, "42"), prompt)
    return {"own": [SampleGroup(prompt=prompt, samples=(sample,))]}


async def eval_nothing(args, step, evaluation):
    return {}


async def eval_unscored(args, step, evaluation):
    from slime_like.records import Prompt

    prompt = Prompt(index=0, text="", tokens=np.array([3], dtype=np.int32), label="42")
    return {"own": [SampleGroup(prompt=prompt, samples=(_answer(prompt, "42"),))]}
