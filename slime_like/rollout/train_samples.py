"""The last record on this side: what a trainer needs of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from slime_like.algorithms import group_advantages
from slime_like.algorithms.plugins import load_loss_plugins
from slime_like.config.run import RunConfig
from slime_like.config.training import LossConfig
from slime_like.errors import RunError
from slime_like.records import FAILED, TRUNCATED, Sample, SampleGroup, TrainSample


def custom_advantages(config: RunConfig) -> Callable[[list[Sample]], object] | None:
    """--custom-advantage-function-path as to_train_samples takes it; None without one. Raises PluginError; what it gives back raises RunError
    naming the prompt if the user's function raises."""
    function, args = load_loss_plugins(config.loss).advantage, config.plugin_args()
    if function is None:
        return None

    def advantages(samples: list[Sample]) -> object:
        try:
            return function(args, samples)
        except Exception as error:
            where = f"--custom-advantage-function-path {config.loss.custom_advantage_function_path}, prompt {samples[0].prompt_index}"
            raise RunError(f"{where}: the function raised {type(error).__name__}: {error}") from error

    return advantages


def to_train_samples(
    groups: Iterable[SampleGroup], loss: LossConfig, custom: Callable[[list[Sample]], object] | None = None, *, mask_truncated: bool = False
) -> list[TrainSample]:
    """The groups' samples in order, each with its advantage; rewards are normalised within one group only, however many it has.

    custom: samples of a group -> their advantages (--custom-advantage-function-path); raises DataError if it gives something else.
    A failed sample has nothing to train on: it is left out, of the group's baseline too. A sample whose loss mask is all zero, or a truncated one
    with mask_truncated (DAPO's overlong filtering, arXiv:2503.14476, sec. 3.4), trains nothing, but its reward is a part of the baseline.
    """
    train_samples = []
    for group in groups:
        kept = SampleGroup(prompt=group.prompt, samples=tuple(sample for sample in group.samples if sample.status != FAILED))
        if not kept.samples:
            continue
        if custom is None:
            advantages = group_advantages.normalize(kept.rewards, loss)
        else:
            advantages = group_advantages.checked(custom(list(kept.samples)), len(kept.samples), str(loss.custom_advantage_function_path))
        for sample, reward, advantage in zip(kept.samples, kept.rewards, advantages, strict=True):
            train_samples.append(
                TrainSample(
                    prompt_index=sample.prompt_index,
                    sample_index=sample.sample_index,
                    tokens=sample.tokens,
                    loss_mask=np.zeros_like(sample.loss_mask) if mask_truncated and sample.status == TRUNCATED else sample.loss_mask,
                    engine_logprobs=sample.engine_logprobs,
                    weight_versions=sample.weight_versions,
                    reward=float(reward),
                    advantage=float(advantage),
                    routed_experts=sample.routed_experts,
                    metadata=sample.metadata,
                )
            )
    return train_samples
