"""The critic's side of PPO: its model's scores, the clipped value loss, and what it is fitted to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import torch

from slime_like.algorithms.losses import clipped_value_loss
from slime_like.algorithms.reduce import weighted_sum
from slime_like.config.loss import LossConfig
from slime_like.config.run import RunConfig
from slime_like.errors import DataError
from slime_like.megatron_backend.checkpoint.folder import is_megatron_folder
from slime_like.megatron_backend.checkpoint.start_weights import start_source, start_step
from slime_like.megatron_backend.step.advantages import Parts, rollout_advantages
from slime_like.megatron_backend.step.batch import StepBatch
from slime_like.megatron_backend.step.context_parallel import whole
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.objective import LossParts
from slime_like.megatron_backend.step.packing import PackedBatch, packed_rows
from slime_like.megatron_backend.step.runner import StepRunner
from slime_like.records import TrainSample

#: The critic's folder inside --save and --load.
FOLDER = "critic"
#: Returns that vary less than this leave nothing to explain.
LEAST_VARIANCE = 1e-12


def critic_config(config: RunConfig) -> RunConfig:
    """The config as a critic's trainer reads it: its own learning rate, its own checkpoints inside --load and --save.

    Without a critic in --load it starts from --critic-load, else from the actor's first weights; with --lora-rank from
    the actor's first adapters, where both have one base.
    """
    options, optimizer = config.checkpoint, config.optimizer
    load = os.path.join(options.load, FOLDER) if options.load else None
    own = dataclasses.replace(
        options,
        load=load,
        ckpt_step=options.ckpt_step if load and is_megatron_folder(load) else None,
        save=os.path.join(options.save, FOLDER) if options.save else None,
        ref_load=options.critic_load or start_source(options),
        ref_ckpt_step=None if options.critic_load else start_step(options),
    )
    learning_rate = optimizer.lr if optimizer.critic_lr is None else optimizer.critic_lr
    lora = config.lora.of_critic if config.lora.enabled else config.lora
    if options.critic_load:
        lora = dataclasses.replace(lora, lora_load=None)
    return dataclasses.replace(
        config, checkpoint=own, optimizer=dataclasses.replace(optimizer, lr=learning_rate), lora=lora
    )


class ValueRunner(StepRunner):
    """Runs a critic over packed micro-batches. Cutting and means are the policy's, so is the order of everything."""

    scores = ("values",)

    def _score(self, outputs: torch.Tensor, pack_: PackedBatch) -> dict[str, torch.Tensor]:
        values, predictions = outputs.reshape(-1).float(), pack_.predictions
        return {"values": whole(values if predictions is None else values[predictions.rows], pack_.restoring)}

    def _loss_parts(self, scores: dict[str, torch.Tensor], batch: StepBatch, index: int, loss: LossSpec) -> LossParts:
        """The share of the clipped value loss; the batch's columns are `values`, those of before, and `returns`."""
        if not loss.is_configured:
            raise ValueError(f"a critic has no log-probs, which the loss {loss.name!r} is about.")
        pack_, old, target = batch.packs[index], batch.column("values", index), batch.column("returns", index)
        assert old is not None and target is not None, "a critic is fitted to returns"
        values = scores["values"][pack_.trained]
        part = clipped_value_loss(values, old, target, value_clip=self.loss.value_clip)
        total = weighted_sum(part.loss, pack_.weights)
        error, returns = target.double() - values.detach().double(), target.double()
        sums = {"train/value_loss": total.detach(), "train/value_clip_ratio": weighted_sum(part.clipped, pack_.weights)}
        sums |= {
            "values": values.detach().double().sum(),
            "returns": returns.sum(),
            "returns squared": returns.square().sum(),
        }
        sums |= {"error": error.sum(), "error squared": error.square().sum()}
        return LossParts(loss=total, sums={name: value.double() for name, value in sums.items()})

    def _metrics(self, sums: dict[str, float], batch: StepBatch) -> dict[str, float]:
        return _value_metrics(sums, max(batch.num_trained_tokens, 1))


def _value_metrics(sums: dict[str, float], num_tokens: int) -> dict[str, float]:
    """Means, and how much of the returns' variance over trained tokens the critic explains: 1 all, 0 nothing (or
    nothing varies).
    """
    mean, mean_error = sums["returns"] / num_tokens, sums["error"] / num_tokens
    variance, unexplained = (
        sums["returns squared"] / num_tokens - mean**2,
        sums["error squared"] / num_tokens - mean_error**2,
    )
    return {
        "train/value_loss": sums["train/value_loss"],
        "train/value_clip_ratio": sums["train/value_clip_ratio"],
        "train/value_explained_variance": 1.0 - unexplained / variance if variance > LEAST_VARIANCE else 0.0,
        "train/value_mean": sums["values"] / num_tokens,
        "train/return_mean": mean,
    }


def _brought(sample: TrainSample) -> np.ndarray:
    """The values that a sample brought. Raises DataError if it has none."""
    if sample.values is None:
        raise DataError(
            f"sample {sample.prompt_index}/{sample.sample_index} has no values, which the critic is fitted from."
        )
    return sample.values


def with_value_targets(parts: Parts, batches: Sequence[StepBatch], loss: LossConfig) -> list[StepBatch]:
    """The batches of one rollout with the values that their samples bring, and the returns; on every pipeline stage.

    Collective.
    """
    targets = []
    for part, batch, (_, returns) in zip(parts, batches, rollout_advantages(parts, batches, loss), strict=True):
        old = {index: _brought(part[index]) for index in returns}
        targets.append(
            batch.with_columns(values=packed_rows(old, batch.packs), returns=packed_rows(returns, batch.packs))
        )
    return targets
