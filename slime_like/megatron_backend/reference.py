"""Models that only score (reference, teacher): their weights, kept on the host and swapped in.

Or log-probs as the samples brought them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.model.stage_weights import named_weights
from slime_like.megatron_backend.step.packing import PackedBatch, packed_rows
from slime_like.records import BASE, TrainSample, WeightsRef

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


class HeldWeights:
    """Whose weights a model holds: BASE's, or for a while those of a model that only scores, which lie on the host."""

    def __init__(self, stage: torch.nn.Module):
        self._stage = stage
        self._frozen: dict[str, Weights] = {}
        self._in_model = BASE.name

    def __contains__(self, weights: WeightsRef) -> bool:
        return weights.name == BASE.name or weights.name in self._frozen

    @property
    def has_base(self) -> bool:
        """Whether the model holds just now what is trained."""
        return self._in_model == BASE.name

    @contextlib.contextmanager
    def using(self, weights: WeightsRef) -> Iterator[None]:
        """Inside, the model holds these weights. Raises ValueError for ones that are not here."""
        if weights.name == self._in_model:
            yield
            return
        if weights.name not in self._frozen:
            raise ValueError(
                f"weights {weights.name!r} are not loaded. Known: {', '.join([BASE.name, *self._frozen])}."
            )
        with swapped(self._stage, self._frozen[weights.name]):
            before, self._in_model = self._in_model, weights.name
            try:
                yield
            finally:
                self._in_model = before

    def copy(self, source: WeightsRef, target: WeightsRef) -> None:
        """Keep the present `source` as the frozen weights `target`."""
        assert target.name != BASE.name, "what is trained is loaded, with the optimizer's part of it"
        with self.using(source):
            self._frozen[target.name] = copy_weights(self._stage)

    def keep(self, target: WeightsRef, load: Callable[[], None]) -> None:
        """Keep what `load` puts into the model as the frozen weights `target`; the model gets its own back."""
        own = copy_weights(self._stage)
        load()
        self._frozen[target.name] = copy_weights(self._stage)
        put_weights(self._stage, own)


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
