"""One advantage for each token of a rollout, from what the trainer itself scored and what the samples brought."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from slime_like.algorithms.covariance import Collectives, draws, picked
from slime_like.algorithms.token_advantages import sample_advantages
from slime_like.config.loss import LossConfig
from slime_like.megatron_backend.step.batch import Scores, StepBatch
from slime_like.megatron_backend.step.packing import packed_rows, record_layout
from slime_like.records import TrainSample

#: The samples of each train step; positions in them are those of PackedBatch.samples.
Parts = Sequence[Sequence[TrainSample]]
#: Position of one of this rank's samples -> [T].
Rows = dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepScores:
    """Log-probs of one train step's tokens before the rollout's first step; None where they are not needed."""

    old: Scores = None  # the policy's
    reference: Scores = None
    teacher: Scores = None


def rollout_advantages(parts: Parts, batches: Sequence[StepBatch], loss: LossConfig) -> list[tuple[Rows, Rows]]:
    """(advantages, returns) of each train step's samples on this rank. Whitened over the whole rollout.

    Collective over data parallel ranks.
    """
    places = [(step, index) for step, batch in enumerate(batches) for pack_ in batch.packs for index in pack_.samples]
    advantages, returns = sample_advantages([parts[step][index] for step, index in places], loss, _sum_over_data_ranks)
    steps: list[tuple[Rows, Rows]] = [({}, {}) for _ in batches]
    for (step, index), advantage, return_ in zip(places, advantages, returns, strict=True):
        steps[step][0][index], steps[step][1][index] = advantage, return_
    return steps


def with_token_advantages(
    parts: Parts, batches: Sequence[StepBatch], loss: LossConfig, scores: Sequence[StepScores]
) -> list[StepBatch]:
    """The batches of one rollout with one advantage a token. Collective over data parallel ranks.

    Stages without logits get their batches back: no loss is computed there.
    """
    if not parallel_state.is_pipeline_last_stage():
        return list(batches)
    scored = [_with_scores(part, batch, loss, score) for part, batch, score in zip(parts, batches, scores, strict=True)]
    new_batches = []
    for batch, (advantages, _) in zip(batches, rollout_advantages(scored, batches, loss), strict=True):
        rows = packed_rows(advantages, batch.packs)
        packs = tuple(
            dataclasses.replace(pack_, advantages=row[pack_.trained])
            for pack_, row in zip(batch.packs, rows, strict=True)
        )
        new_batches.append(dataclasses.replace(batch, packs=packs))
    return new_batches


def with_picked_tokens(
    parts: Parts, batches: Sequence[StepBatch], loss: LossConfig, scores: Sequence[StepScores]
) -> list[StepBatch]:
    """The batches of one rollout with the tokens that the policy loss treats apart.

    Collective over data parallel ranks; see with_token_advantages.
    """
    if not parallel_state.is_pipeline_last_stage():
        return list(batches)
    new_batches = []
    for part, batch, score in zip(parts, batches, scores, strict=True):
        assert score.old is not None, "tokens are picked by the policy's own log-probs before the step"
        old = torch.cat([row[pack_.trained] for row, pack_ in zip(score.old, batch.packs, strict=True)])
        advantages = torch.cat([pack_.advantages for pack_ in batch.packs])
        ties = torch.as_tensor(np.concatenate([draws(part, pack_.samples) for pack_ in batch.packs]), device=old.device)
        chosen = picked(
            old, advantages, ties, loss, Collectives(sum=_sum_over_data_ranks, gather=_gathered_over_data_ranks)
        )
        new_batches.append(
            dataclasses.replace(batch, picked=chosen.split([len(pack_.trained) for pack_ in batch.packs]))
        )
    return new_batches


def _with_scores(
    part: Sequence[TrainSample], batch: StepBatch, loss: LossConfig, scores: StepScores
) -> list[TrainSample]:
    """This rank's samples of a train step with the KL and the distance to the teacher that their advantages need.

    Others as they were.
    """
    samples = list(part)
    others = {"kl": scores.reference if loss.kl_in_trainer else None, "distillation": scores.teacher}
    for name, theirs in others.items():
        if theirs is None:
            continue
        assert scores.old is not None, f"{name} is a difference from the policy's own log-probs"
        for pack_, ours, other in zip(batch.packs, scores.old, theirs, strict=True):
            for index, row in zip(pack_.samples, record_layout(ours - other, pack_.lengths), strict=True):
                change: dict[str, Any] = {name: row}
                samples[index] = dataclasses.replace(samples[index], **change)
    return samples


def _sum_over_data_ranks(tensor: torch.Tensor) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = tensor.to(device, copy=True).contiguous()
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.to(tensor.device)


def _gathered_over_data_ranks(tensor: torch.Tensor) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine, group = tensor.to(device).contiguous(), parallel_state.get_data_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, mine, group=group)
    return torch.cat(parts).to(tensor.device)
