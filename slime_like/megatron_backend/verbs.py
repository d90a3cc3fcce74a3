"""What a trainer's verbs give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core import parallel_state

from slime_like.megatron_backend.step.batch import Scores, StepBatch
from slime_like.megatron_backend.step.packing import record_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a pass over a batch gave.

    Metrics are equal on every rank; scores are of this rank's samples, until `rows` brings them together.
    """

    batch: StepBatch  # the batch, with what the pass recorded in it
    scores: Mapping[str, Scores]  # "log_probs" and "entropy", or a critic's "values"
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def rows(self, name: str) -> list[np.ndarray]:
        """[T] float32 of every sample in the batch's order, laid out as in records.Sample with entry 0 0.

        The same on every rank. Collective.
        """
        mine: dict[int, np.ndarray] = {}
        scores = self.scores[name]
        is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        if scores is not None and is_first:
            for pack_, values in zip(self.batch.packs, scores, strict=True):
                mine.update(zip(pack_.samples, record_layout(values, pack_.lengths), strict=True))
        parts: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
        merged = {index: row for part in parts for index, row in part.items()}
        return [merged[i] for i in range(self.batch.num_samples)]
