"""Hooks that break their protocol, each in one way; and a group of given rewards."""

from __future__ import annotations

import dataclasses

import numpy as np

from scripts.examples.hooks import best_of_group
from slime_like.records import Prompt, Sample, SampleGroup


def group(index: int, rewards: list[float]) -> SampleGroup:
    """Two answer tokens behind one of a prompt."""
    samples = [
        Sample(
            prompt_index=index,
            sample_index=number,
            tokens=np.arange(3, dtype=np.int32),
            loss_mask=np.array([0, 1, 1], dtype=np.int8),
            engine_logprobs=np.zeros(3, dtype=np.float32),
            weight_versions=np.array([-1, 0, 0], dtype=np.int32),
            response="",
            reward=float(reward),
        )
        for number, reward in enumerate(rewards)
    ]
    return SampleGroup(prompt=Prompt(index=index, text="", tokens=np.zeros(1, dtype=np.int32)), samples=tuple(samples))


def no_arguments():
    return None


def raising(args, groups):
    raise ValueError("mine")


def raising3(args, groups, source):
    raise ValueError("mine")


def one_number(args, groups):
    return [1.0]


def numbers_for_bools(args, groups):
    return [[1] * len(group.samples) for group in groups]


def nan_numbers(args, samples):
    return [float("nan")] * len(samples)


def texts(args, samples):
    return ["one"] * len(samples)


def last_prompts(args, groups, count):
    return groups[-count:]


def same_group_twice(args, groups, count):
    return [groups[0]] * count


def too_few_groups(args, groups, count):
    return groups[: count - 1]


def foreign_group(args, groups, count):
    return [groups[0], group(99, [1, 0])]


def numbers(args, groups, count):
    return [0, 1]


def no_train_samples(args, groups):
    return [1, 2]


def short_advantages(args, groups):
    return [dataclasses.replace(best_of_group(args, groups)[0], advantages=np.zeros(2))]


def nan_advantages(args, groups):
    return [dataclasses.replace(best_of_group(args, groups)[0], advantages=np.full(3, np.nan))]


def fractional_mask(args, groups):
    return [dataclasses.replace(best_of_group(args, groups)[0], loss_mask=np.array([0, 0.5, 1]))]


def nan_in_the_prompt(args, groups):
    return [dataclasses.replace(best_of_group(args, groups)[0], engine_logprobs=np.array([np.nan, 0, 0]))]


def text_metric(step, args, samples, metrics, seconds):
    return {"x": "many"}


def true_as_slime_has_it(step, args, samples, metrics, seconds):
    return True
