"""Models that only score (reference, teacher): their weights, kept on the host and swapped in.

Or log-probs as the samples brought them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.model.stage_weights import named_weights
from slime_like.megatron_backend.step.packing import PackedBatch, packed_rows
from slime_like.records import TrainSample

Weights = dict[str, torch.Tensor]


@torch.no_grad()
def copy_weights(stage: torch.nn.Module) -> Weights:
    """This rank's weights, copied to host memory."""
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named_weights(stage)}


@torch.no_grad()
def put_weights(stage: torch.nn.Module, weights: Weights) -> None:
    """Overwrite this rank's weights in place: gradient buffers and optimizer keep pointing at them."""
    for name, weight in named_weights(stage):
        weight.copy_(weights[name])


@contextlib.contextmanager
def swapped(stage: torch.nn.Module, weights: Weights) -> Iterator[None]:
    """Inside, the model computes with `weights`; afterwards, also after an error, with exactly its own again."""
    own = copy_weights(stage)
    put_weights(stage, weights)
    try:
        yield
    finally:
        put_weights(stage, own)


def brought_log_probs(samples: Sequence[TrainSample], packs: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """`reference_logprobs` of one train step's samples, as packs want them: [T] each, in predicting layout.

    Raises DataError if a sample has none, or one of another length.
    """
    return packed_rows({index: checked_row(samples[index]) for pack in packs for index in pack.samples}, packs)


def checked_row(sample: TrainSample) -> np.ndarray:
    """`reference_logprobs` of a sample. Raises DataError if it has none, or one of another length."""
    row, length = sample.reference_logprobs, len(sample.tokens)
    if row is None or len(row) != length:
        name = f"{sample.prompt_index}/{sample.sample_index}"
        raise DataError(
            f"sample {name} of {length} tokens has {'no' if row is None else len(row)} reference log-probs."
        )
    return row
