"""The last record on this side: what a trainer needs of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from slime_like.algorithms import group_advantages
from slime_like.algorithms.loss_plugins import load_loss_plugins
from slime_like.config.loss import LossConfig
from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.records import FAILED, TRUNCATED, Sample, SampleGroup, TrainSample, per_token_of_each
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from slime_like.utils.user_functions import Hook


def custom_advantages(config: RunConfig) -> Callable[[list[Sample]], object] | None:
    """--custom-advantage-function-path as to_train_samples takes it; None without one. Raises PluginError; what it
    gives back raises RunError naming the prompt if the user's function raises."""
    function, args = load_loss_plugins(config.loss).advantage, config.plugin_args()
    if function is None:
        return None

    def advantages(samples: list[Sample]) -> object:
        try:
            return function(args, samples)
        except Exception as error:
            where = (
                f"--custom-advantage-function-path {config.loss.custom_advantage_function_path}, prompt"
                f" {samples[0].prompt_index}"
            )
            raise RunError(f"{where}: the function raised {type(error).__name__}: {error}") from error

    return advantages


def train_samples_of(config: RunConfig, groups: Sequence[SampleGroup]) -> list[TrainSample]:
    """What trainers get of a rollout: as to_train_samples says, or --custom-convert-samples-to-train-data-path."""
    plugins, args = load_rollout_plugins(config), config.plugin_args()
    if plugins.convert is not None:
        return checked_train_samples(plugins.convert, plugins.convert(args, list(groups)))
    post = plugins.post_process
    return to_train_samples(
        groups,
        config.loss,
        custom_advantages(config),
        post_process=None if post is None else lambda samples: checked_rewards(post, post(args, samples), len(samples)),
        group_size=config.rollout.n_samples_per_prompt,
        mask_truncated=config.rollout.mask_truncated_samples,
    )


def to_train_samples(
    groups: Iterable[SampleGroup],
    loss: LossConfig,
    custom: Callable[[list[Sample]], object] | None = None,
    *,
    post_process: Callable[[list[Sample]], np.ndarray] | None = None,
    group_size: int = 1,
    mask_truncated: bool = False,
) -> list[TrainSample]:
    """The groups' samples in order, each token with its sample's advantage; rewards are compared within one group only,
    however many it has.

    group_size: --n-samples-per-prompt; one sample that is left of several teaches nothing.
    custom: samples of a group -> their advantages (--custom-advantage-function-path); raises DataError if it gives
    something else. post_process: the last samples of all answers of the rollout -> their rewards, which then are not
    compared any more (--custom-reward-post-process-path).
    An answer of several samples (segments of an episode) is compared once, by its last one, and all of them get its
    advantage. A failed sample has nothing to train on: it is left out, of the group's baseline too. A sample whose loss
    mask is all zero, or a truncated one with mask_truncated (DAPO's overlong filtering, arXiv:2503.14476, sec. 3.4),
    trains nothing, but its reward is a part of the baseline.
    """
    taught: list[tuple[Sample, float, float]] = []  # with its reward and advantage
    dtype = np.float64 if loss.has_token_advantages else np.float32  # rounded once, after the last computation
    usable = [
        SampleGroup(prompt=group.prompt, samples=tuple(sample for sample in group.samples if sample.status != FAILED))
        for group in groups
    ]
    deviation = (
        group_advantages.batch_deviation(group.rewards for group in usable if group.samples)
        if loss.estimator.scale == "batch"
        else 0.0
    )
    processed: Iterator[float] = (
        iter(()) if post_process is None else iter(post_process(_last_samples(usable)).tolist())
    )
    for group in usable:
        if not group.samples:
            continue
        rewards = group.rewards
        if post_process is not None:
            rewards = advantages = np.array([next(processed) for _ in group.episodes])
        elif custom is None:
            advantages = group_advantages.normalize(group.rewards, loss, group_size=group_size, deviation=deviation)
        else:
            last = [segments[-1] for segments in group.episodes]
            advantages = group_advantages.checked(custom(last), len(last), str(loss.custom_advantage_function_path))
        for segments, reward, advantage in zip(group.episodes, rewards, advantages, strict=True):
            taught += [(sample, float(reward), float(advantage)) for sample in segments]
    masks = [
        np.zeros_like(sample.loss_mask) if mask_truncated and sample.status == TRUNCATED else sample.loss_mask
        for sample, _, _ in taught
    ]
    advantages_of = per_token_of_each([advantage for *_, advantage in taught], masks, dtype)
    weights_of = per_token_of_each([1.0] * len(masks), masks)
    return [
        _train_sample(sample, reward, mask, advantages, weights)
        for (sample, reward, _), mask, advantages, weights in zip(taught, masks, advantages_of, weights_of, strict=True)
    ]


def _last_samples(groups: Iterable[SampleGroup]) -> list[Sample]:
    return [segments[-1] for group in groups for segments in group.episodes]


def checked_rewards(hook: Hook, rewards: object, count: int) -> np.ndarray:
    """What --custom-reward-post-process-path gave, as [count] float64. Raises RunError for anything else."""
    try:
        values = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise hook.error(f"gave no numbers: {error}") from error
    if values.shape != (count,) or not np.isfinite(values).all():
        raise hook.error(f"gave {str(rewards)[:200]}; it must give one finite number for each of {count} samples.")
    return values


def checked_train_samples(hook: Hook, samples: object) -> list[TrainSample]:
    """What --custom-convert-samples-to-train-data-path gave. Raises RunError naming a sample that cannot be trained."""
    if not isinstance(samples, (list, tuple)) or not samples or not all(isinstance(s, TrainSample) for s in samples):
        raise hook.error(f"gave {str(samples)[:200]}; it must give a list of records.TrainSample.")
    for sample in samples:
        what = _fault(sample)
        if what:
            raise hook.error(f"sample {sample.prompt_index}/{sample.sample_index}: {what}.")
    return list(samples)


_PER_TOKEN = ("loss_mask", "engine_logprobs", "weight_versions", "advantages", "weights")


def _fault(sample: TrainSample) -> str:
    """Why a sample cannot be trained on; "" if it can."""
    length = len(sample.tokens)
    if length == 0 or not np.issubdtype(np.asarray(sample.tokens).dtype, np.integer) or np.min(sample.tokens) < 0:
        return "tokens must be ids, at least one"
    lengths = {name: len(getattr(sample, name)) for name in _PER_TOKEN if len(getattr(sample, name)) != length}
    if lengths:
        return f"{length} tokens, but {lengths}"
    if not set(np.unique(sample.loss_mask).tolist()) <= {0, 1}:
        return "loss_mask must be 0 or 1"
    if not np.isfinite(sample.reward):
        return f"reward is {sample.reward}"
    trained = np.asarray(sample.loss_mask) != 0
    for name in ("engine_logprobs", "advantages", "weights"):
        if not np.isfinite(np.asarray(getattr(sample, name))[trained]).all():
            return f"{name} are not finite where it is trained"
    return ""


def _train_sample(
    sample: Sample, reward: float, loss_mask: np.ndarray, advantages: np.ndarray, weights: np.ndarray
) -> TrainSample:
    return TrainSample(
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        tokens=sample.tokens,
        loss_mask=loss_mask,
        engine_logprobs=sample.engine_logprobs,
        weight_versions=sample.weight_versions,
        reward=reward,
        advantages=advantages,
        weights=weights,
        routed_experts=sample.routed_experts,
        metadata=sample.metadata,
    )
