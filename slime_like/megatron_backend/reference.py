"""The reference model's log-probs: from a second set of weights kept on the host and swapped in, or as the samples brought them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.packing import PackedBatch
from slime_like.records import TrainSample

Weights = dict[str, torch.Tensor]


@torch.no_grad()
def copy_weights(stage: torch.nn.Module) -> Weights:
    """This rank's parameters, copied to host memory."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in stage.named_parameters()}


@torch.no_grad()
def put_weights(stage: torch.nn.Module, weights: Weights) -> None:
    """Overwrite this rank's parameters in place: gradient buffers and optimizer keep pointing at them."""
    for name, parameter in stage.named_parameters():
        parameter.copy_(weights[name])


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
    found = []
    for pack in packs:
        values, start = np.zeros(pack.tokens.shape[1], dtype=np.float32), 0
        for index, length in zip(pack.samples, pack.lengths, strict=True):
            row = samples[index].reference_logprobs
            if row is None or len(row) != length:
                sample = f"{samples[index].prompt_index}/{samples[index].sample_index}"
                raise DataError(f"sample {sample} of {length} tokens has {'no' if row is None else len(row)} reference log-probs.")
            values[start : start + length - 1] = row[1:]
            start += length
        found.append(torch.as_tensor(values, device=pack.tokens.device))
    return found
