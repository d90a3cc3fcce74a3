"""One tenant's numbers on this rank: weights, gradients and Adam's moments, each in one piece of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.optim.adamw import adamw

from slime_like.megatron_backend.host_memory import host_memory, wait_for_copies
from slime_like.megatron_backend.step.optimizer import AdamParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantParameter:
    """A parameter of the model, and how its gradient is summed and its step taken."""

    parameter: torch.nn.Parameter
    lr_ratio: float = 1.0  # its learning rate over the caller's
    decays: bool = True  # whether the weight decay is taken from it
    #: what tensor parallel ranks do with its gradients: "sum" where each saw a part of what it is for, "average" where
    #: each saw all of it, None where each has rows or columns of its own
    across_tensor: str | None = None
    is_expert: bool = False  # its data parallel ranks are the experts'
    counts_in_norm: bool = True  # False where another rank's copy does


class TenantMemory:
    """Weights, gradients and moments of a tenant, in the order of `entries`, end to end; fp32, whatever the model's
    type.

    attached: the parameters are the tenant's own and lie in this memory; else they are the model's, and hold the
    tenant's weights between `put` and somebody else's. What a pass adds counts only when it is kept, so that one that
    fails leaves no trace.
    """

    def __init__(self, entries: Sequence[TenantParameter], device: torch.device, *, attached: bool):
        self.entries = sorted(entries, key=lambda entry: (entry.lr_ratio, entry.decays))  # a few slices for Adam
        self.attached, self.device = attached, device
        sizes = [entry.parameter.numel() for entry in self.entries]
        self._starts = [0, *itertools.accumulate(sizes)][: len(sizes)]
        self.size = sum(sizes)
        dtype = self.entries[0].parameter.dtype if self.entries else torch.float32
        self.master = torch.cat(
            [torch.zeros(0, device=device), *(e.parameter.detach().float().flatten() for e in self.entries)]
        )
        #: what the model computes with
        self.weights = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradient: torch.Tensor | None = None
        self.moments: tuple[torch.Tensor, torch.Tensor] | None = None  # Adam's first and second; None before a step
        self.num_steps = 0
        self._added: torch.Tensor | None = None  # by the present pass
        self._hooks: list = []
        self._host: torch.Tensor | None = None
        self.is_resident = True
        if attached:
            self._attach()

    # ------------------------------------------------------------------ views

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A piece of memory as the parameters' shapes."""
        return [
            flat[start : start + entry.parameter.numel()].view(entry.parameter.shape)
            for entry, start in zip(self.entries, self._starts, strict=True)
        ]

    @contextlib.contextmanager
    def showing(self, flat: torch.Tensor) -> Iterator[None]:
        """Inside, the parameters are these numbers: to be read, or written, as weights are."""
        before = [entry.parameter.data for entry in self.entries]
        for entry, view in zip(self.entries, self.views(flat), strict=True):
            entry.parameter.data = view
        try:
            yield
        finally:
            for entry, data in zip(self.entries, before, strict=True):
                entry.parameter.data = data

    @torch.no_grad()
    def put(self) -> None:
        """The model's parameters get the tenant's weights."""
        assert not self.attached, "they lie in it"
        for entry, view in zip(self.entries, self.views(self.weights), strict=True):
            entry.parameter.copy_(view)

    @torch.no_grad()
    def weights_changed(self) -> None:
        """The master weights were written: what the model computes with follows."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)

    def _attach(self) -> None:
        for entry, view in zip(self.entries, self.views(self.weights), strict=True):
            entry.parameter.data = view

    # ------------------------------------------------------------------ gradients

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, backward passes add to this pass's gradients, in fp32; `keep` or `drop` them afterwards."""
        self._added = torch.zeros(self.size, device=self.device)
        for entry, view in zip(self.entries, self.views(self._added), strict=True):
            entry.parameter.requires_grad_(True)
            entry.parameter.grad = None
            self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(_adding_to(view)))
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            for entry in self.entries:
                entry.parameter.requires_grad_(False)

    def keep(self) -> None:
        """The last pass's gradients are added to those that are there."""
        self.gradient = self._added if self.gradient is None else self.gradient.add_(self._added)
        self._added = None

    def drop(self) -> None:
        """The last pass adds nothing."""
        self._added = None

    def clear_gradient(self) -> None:
        """As after a step."""
        self.gradient = None

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, params: AdamParams) -> None:
        """One step of AdamW with the gradients that are there, which are cleared; zeros where there are none."""
        gradient = torch.zeros_like(self.master) if self.gradient is None else self.gradient
        if self.moments is None:
            self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        for first, end, entry in self._slices():
            adamw(
                [self.master[first:end]],
                [gradient[first:end]],
                [self.moments[0][first:end]],
                [self.moments[1][first:end]],
                [],
                [torch.tensor(float(self.num_steps))],
                amsgrad=False,
                beta1=params.betas[0],
                beta2=params.betas[1],
                lr=params.lr * entry.lr_ratio,
                weight_decay=params.weight_decay if entry.decays else 0.0,
                eps=params.eps,
                maximize=False,
            )
        self.num_steps += 1
        self.weights_changed()
        self.clear_gradient()

    def _slices(self) -> Iterator[tuple[int, int, TenantParameter]]:
        """(first, end, one of its entries) of what is stepped alike."""
        first = 0
        for number, entry in enumerate(self.entries):
            end = self._starts[number] + entry.parameter.numel()
            following = self.entries[number + 1] if number + 1 < len(self.entries) else None
            if following is None or (following.lr_ratio, following.decays) != (entry.lr_ratio, entry.decays):
                yield first, end, entry
                first = end

    # ------------------------------------------------------------------ host and device

    @torch.no_grad()
    def leave(self) -> None:
        """Go to the host, gradients and moments too; the device's memory is given back."""
        if not self.is_resident:
            return
        pieces = [self.master, *(() if self.gradient is None else (self.gradient,)), *(self.moments or ())]
        device = self.master.untyped_storage().device
        if self._host is None or self._host.numel() < 4 * self.size * len(pieces):
            self._host = host_memory(4 * self.size * len(pieces), device)
        rows = self._host.view(torch.float32)[: self.size * len(pieces)].view(len(pieces), self.size)
        for row, piece in zip(rows, pieces, strict=True):
            row.copy_(piece, non_blocking=True)
        wait_for_copies(device)
        nothing = torch.zeros(1, dtype=self.weights.dtype, device=self.device)
        self._place(list(rows))
        for entry in self.entries if self.attached else ():
            entry.parameter.data = nothing.expand(entry.parameter.shape)  # its shape, and no memory of the device
        self.is_resident = False

    @torch.no_grad()
    def come(self) -> None:
        """Be on the device again."""
        if self.is_resident:
            return
        pieces = [self.master, *(() if self.gradient is None else (self.gradient,)), *(self.moments or ())]
        self._place([torch.empty_like(piece, device=self.device).copy_(piece, non_blocking=True) for piece in pieces])
        if self.attached:
            self._attach()
        wait_for_copies(self.master.untyped_storage().device)
        self.is_resident = True

    def _place(self, pieces: list[torch.Tensor]) -> None:
        dtype = self.weights.dtype
        self.master, *others = pieces
        self.weights = self.master if dtype == torch.float32 else self.master.to(dtype)
        if self.gradient is not None:
            self.gradient, *others = others
        if self.moments is not None:
            self.moments = others[0], others[1]


def _adding_to(view: torch.Tensor):
    def add(parameter: torch.Tensor) -> None:
        view.add_(parameter.grad)
        parameter.grad = None

    return add
