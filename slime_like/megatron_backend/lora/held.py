"""Weights that a model with adapters can score with beside the trained ones: the bare base costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from slime_like.megatron_backend.lora.adapter import AdapterSwitch
from slime_like.megatron_backend.lora.build import parts
from slime_like.megatron_backend.reference import HeldWeights
from slime_like.records import BASE, WeightsRef


def held_beside(stage: torch.nn.ModuleList, switch: AdapterSwitch | None) -> HeldWeights:
    """What this rank can score with beside what it trains, with or without adapters."""
    return HeldWeights(stage) if switch is None else HeldAdapters(stage, switch)


class HeldAdapters(HeldWeights):
    """As HeldWeights, where BASE is the frozen base with its adapters.

    Frozen weights are the base without them (`keep_start`), earlier adapters over the same base (`copy`), or another
    whole model, without adapters (`keep`).
    """

    def __init__(self, stage: torch.nn.ModuleList, switch: AdapterSwitch):
        super().__init__(stage)
        self._switch = switch
        self._bare: set[str] = set()
        self._earlier: dict[str, list[torch.Tensor]] = {}

    def __contains__(self, weights: WeightsRef) -> bool:
        return super().__contains__(weights) or weights.name in self._bare or weights.name in self._earlier

    def keep_start(self, target: WeightsRef) -> None:
        """The base alone is `target` from now on, without a copy of it."""
        self._bare.add(target.name)

    @contextlib.contextmanager
    def using(self, weights: WeightsRef) -> Iterator[None]:
        """Inside, the model holds these weights. Raises ValueError for ones that are not here."""
        name, before = weights.name, self._in_model
        if name == before:
            yield
        elif name in self._earlier:
            own = self._adapters()
            self._put(self._earlier[name])
            try:
                with self._standing_for(name):
                    yield
            finally:
                self._put(own)
        elif name in self._bare:
            with self._switch.off(), self._standing_for(name):
                yield
        else:
            with self._switch.off(), super().using(weights):
                yield

    def copy(self, source: WeightsRef, target: WeightsRef) -> None:
        """Keep the present adapters of `source` as the frozen weights `target`."""
        assert target.name != BASE.name, "what is trained is loaded, with the optimizer's part of it"
        assert source.name == BASE.name, "only what is trained has adapters"
        self._bare.discard(target.name)
        self._earlier[target.name] = self._adapters()
        self._as_base.add(target.name)

    def _adapters(self) -> list[torch.Tensor]:
        return [matrix.detach().clone() for _, part in parts(self._stage.children()) for matrix in part.parameters()]

    @torch.no_grad()
    def _put(self, matrices: list[torch.Tensor]) -> None:
        own = [matrix for _, part in parts(self._stage.children()) for matrix in part.parameters()]
        for matrix, earlier in zip(own, matrices, strict=True):
            matrix.copy_(earlier)
