"""Models that only score (reference, teacher): their weights, kept on the host and swapped in.

Or log-probs as the samples brought them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.host_memory import host_memory, wait_for_copies
from slime_like.megatron_backend.model.stage_weights import named_weights
from slime_like.megatron_backend.step.packing import PackedBatch, packed_rows
from slime_like.records import TrainSample

Weights = dict[str, torch.Tensor]


#: Where each tensor begins in the host's memory: as aligned as torch's own.
_ALIGNMENT_BYTES = 64


@torch.no_grad()
def copy_weights(stage: torch.nn.Module, into: Weights | None = None) -> Weights:
    """This rank's weights, copied to host memory: one piece of it, page-locked beside a GPU.

    into: an earlier copy of the same model, which is overwritten and given back.
    """
    weights = dict(named_weights(stage))
    copies = _laid_out(weights) if into is None else into
    for name, weight in weights.items():
        copies[name].copy_(weight, non_blocking=True)
    _wait(weights)
    return copies


@torch.no_grad()
def put_weights(stage: torch.nn.Module, weights: Weights) -> None:
    """Overwrite this rank's weights in place: gradient buffers and optimizer keep pointing at them."""
    own = dict(named_weights(stage))
    for name, weight in own.items():
        weight.copy_(weights[name], non_blocking=True)
    _wait(own)


def _laid_out(weights: Weights) -> Weights:
    """Host memory for each tensor, one behind the other."""
    starts, end = {}, 0
    for name, weight in weights.items():
        starts[name] = end
        end += -(-weight.numel() * weight.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    device = next(iter(weights.values())).untyped_storage().device
    memory = host_memory(end, device)
    return {
        name: memory[start : start + weight.numel() * weight.element_size()].view(weight.dtype).view(weight.shape)
        for (name, weight), start in zip(weights.items(), starts.values(), strict=True)
    }


def _wait(weights: Weights) -> None:
    for device in {weight.untyped_storage().device for weight in weights.values()}:
        wait_for_copies(device)


class WeightSwap:
    """Other weights in a model for a while. Its own are copied to the host once after each change of theirs, however
    many others are swapped in, and always to the same memory.
    """

    def __init__(self, stage: torch.nn.Module):
        self._stage = stage
        self._own: Weights | None = None
        self._is_current = False

    def own_changes(self) -> None:
        """The model's own weights are about to change, or may be."""
        self._is_current = False

    @contextlib.contextmanager
    def holding(self, weights: Weights) -> Iterator[None]:
        """Inside, the model computes with `weights`; afterwards, also after an error, with exactly its own again."""
        if self._own is None or not self._is_current:
            self._own = copy_weights(self._stage, into=self._own)
            self._is_current = True
        put_weights(self._stage, weights)
        try:
            yield
        finally:
            put_weights(self._stage, self._own)


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
