"""Models that only score (reference, teacher): their weights, kept on the host and swapped in.

Or log-probs as the samples brought them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.host_memory import host_memory, wait_for_copies
from slime_like.megatron_backend.model.stage_weights import named_weights
from slime_like.megatron_backend.step.packing import PackedBatch, packed_rows
from slime_like.records import BASE, TrainSample, WeightsRef
from slime_like.weight_sync.buckets import aligned_bytes, num_bytes

Weights = dict[str, torch.Tensor]


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
        end += aligned_bytes(weight)
    memory = host_memory(end, next(iter(weights.values())).untyped_storage().device)
    return {
        name: memory[start : start + num_bytes(weight)].view(weight.dtype).view(weight.shape)
        for (name, weight), start in zip(weights.items(), starts.values(), strict=True)
    }


def _wait(weights: Weights) -> None:
    for device in {weight.untyped_storage().device for weight in weights.values()}:
        wait_for_copies(device)


class HeldWeights:
    """Whose weights a model holds: BASE's, or for a while those of a model that only scores, which lie on the host.

    BASE's are copied to the host once after each change of theirs (`base_changes`), however many others are swapped in
    meanwhile, and always to the same memory. Those that are still what BASE is are not swapped in at all.
    """

    def __init__(self, stage: torch.nn.Module):
        self._stage = stage
        self._frozen: dict[str, Weights] = {}
        self._in_model = BASE.name
        self._base: Weights | None = None
        self._base_is_current = False
        self._as_base: set[str] = set()  # frozen ones that equal BASE's

    def __contains__(self, weights: WeightsRef) -> bool:
        return weights.name == BASE.name or weights.name in self._frozen

    @property
    def has_base(self) -> bool:
        """Whether the model holds just now what is trained."""
        return self._in_model == BASE.name

    def base_changes(self) -> None:
        """What is trained is about to change, or may be: its copy is of no use any more."""
        self._base_is_current = False
        self._as_base.clear()

    def is_base(self, weights: WeightsRef) -> bool:
        """Whether these are, number by number, what is trained: copies of it since which it has not changed."""
        return weights.name in self._as_base

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
        before = self._in_model
        if before == BASE.name and self.is_base(weights):
            with self._standing_for(weights.name):
                yield
            return
        back = self._copy_of_base() if before == BASE.name else self._frozen[before]
        put_weights(self._stage, self._frozen[weights.name])
        self._in_model = weights.name
        try:
            yield
        finally:
            put_weights(self._stage, back)
            self._in_model = before

    def keep_start(self, target: WeightsRef) -> None:
        """The weights that what is trained starts from are `target` from now on."""
        self.copy(BASE, target)

    def copy(self, source: WeightsRef, target: WeightsRef) -> None:
        """Keep the present `source` as the frozen weights `target`."""
        assert target.name != BASE.name, "what is trained is loaded, with the optimizer's part of it"
        same = source.name == BASE.name or self.is_base(source)
        with self.using(source):
            self._freeze(target)
        self._as_base = self._as_base | {target.name} if same else self._as_base - {target.name}

    def keep(self, target: WeightsRef, load: Callable[[], None]) -> None:
        """Keep what `load` puts into the model as the frozen weights `target`; the model gets its own back."""
        assert self.has_base, "frozen weights are loaded while the model holds its own"
        own = self._copy_of_base()
        load()
        self._freeze(target)
        self._as_base.discard(target.name)
        put_weights(self._stage, own)

    @contextlib.contextmanager
    def _standing_for(self, name: str) -> Iterator[None]:
        """Inside, what the model holds goes by this name."""
        before, self._in_model = self._in_model, name
        try:
            yield
        finally:
            self._in_model = before

    def _freeze(self, target: WeightsRef) -> None:
        self._frozen[target.name] = copy_weights(self._stage, into=self._frozen.get(target.name))

    def _copy_of_base(self) -> Weights:
        if self._base is None or not self._base_is_current:
            self._base = copy_weights(self._stage, into=self._base)
            self._base_is_current = True
        return self._base


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
