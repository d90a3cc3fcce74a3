"""The last record on this side: what a trainer needs of each sample."""

from __future__ import annotations

from collections.abc import Iterable

from slime_like.algorithms import group_advantages
from slime_like.config.training import LossConfig
from slime_like.records import FAILED, SampleGroup, TrainSample


def to_train_samples(groups: Iterable[SampleGroup], loss: LossConfig) -> list[TrainSample]:
    """The groups' samples in order, each with its advantage; rewards are normalised within one group only.

    A failed sample has nothing to train on: it is left out, of the group's baseline too.
    """
    train_samples = []
    for group in groups:
        kept = SampleGroup(prompt=group.prompt, samples=tuple(sample for sample in group.samples if sample.status != FAILED))
        if not kept.samples:
            continue
        advantages = group_advantages.normalize(kept.rewards, loss)
        for sample, reward, advantage in zip(kept.samples, kept.rewards, advantages, strict=True):
            train_samples.append(
                TrainSample(
                    prompt_index=sample.prompt_index,
                    sample_index=sample.sample_index,
                    tokens=sample.tokens,
                    loss_mask=sample.loss_mask,
                    engine_logprobs=sample.engine_logprobs,
                    weight_versions=sample.weight_versions,
                    reward=float(reward),
                    advantage=float(advantage),
                )
            )
    return train_samples
