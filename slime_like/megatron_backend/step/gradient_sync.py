"""How gradients add up: over a rank's passes, and over data parallel ranks, at the end or while passes still run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.utils import get_model_config

#: Elements of a gradient that are added up at once on the host.
_BLOCK = 1 << 18


def add_gradients_in_blocks(model: Sequence[DistributedDataParallel]) -> None:
    """On the host, add bf16 gradients to fp32 sums block by block.

    Megatron (0.16.1, distributed_data_parallel.py:440) adds them at once, for which torch makes a copy in fp32, in new
    memory: three times as slow. With --overlap-grad-reduce, which wants to see each gradient, it still does.
    """
    for chunk in model:
        for parameter in chunk.parameters():
            total = getattr(parameter, "main_grad", None)
            if (
                total is not None
                and total.device.type == "cpu"
                and total.dtype != parameter.dtype
                and not chunk.ddp_config.overlap_grad_reduce
            ):
                parameter.register_post_accumulate_grad_hook(_add_in_blocks)


def _add_in_blocks(parameter: torch.Tensor) -> None:
    total, own = parameter.main_grad, parameter.grad
    scratch = total.new_empty(min(_BLOCK, total.numel()))
    for sums, part in zip(total.view(-1).split(_BLOCK), own.reshape(-1).split(_BLOCK), strict=True):
        sums.add_(scratch[: len(part)].copy_(part))
    parameter.grad = None  # Megatron's hook, which comes next, has nothing to add


class GradientSync:
    """The collectives between data parallel ranks around one optimizer step. Every method is collective.

    With --overlap-grad-reduce Megatron's schedules start a bucket's reduction in the last micro-batch's backward pass,
    so nothing may be added afterwards: passes after which more gradients may come are run inside `held_back`. With
    --overlap-param-gather an optimizer step leaves every rank with new values of its own part only; `whole_weights`
    fetches the rest where no forward pass will.
    """

    def __init__(self, model: Sequence[DistributedDataParallel]):
        self._model = list(model)
        self._overlaps = self._model[0].ddp_config.overlap_grad_reduce
        self._gathers_late = self._model[0].ddp_config.overlap_param_gather
        self._held_back = False
        self._stale = self._gathers_late
        if self._overlaps:
            self._connect()

    def _connect(self) -> None:
        """Give the schedules what they call (as megatron.training does). With several chunks the stages start theirs at
        the same time, since one that waits for its collectives would make the others wait too.
        """
        config, several = get_model_config(self._model[0]), len(self._model) > 1
        config.no_sync_func = [chunk.no_sync for chunk in self._model] if several else self._model[0].no_sync
        config.grad_sync_func = [chunk.start_grad_sync for chunk in self._model] if several else None
        config.param_sync_func = (
            [chunk.start_param_sync for chunk in self._model] if several and self._gathers_late else None
        )

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, passes only add to this rank's own gradients."""
        self._held_back = True
        if not self._overlaps:
            yield
            return
        config = get_model_config(self._model[0])
        functions = config.no_sync_func, config.grad_sync_func
        config.no_sync_func = config.grad_sync_func = None
        with contextlib.ExitStack() as stack:
            for chunk in self._model:
                stack.enter_context(chunk.no_sync())
            try:
                yield
            finally:
                config.no_sync_func, config.grad_sync_func = functions

    def finish(self) -> None:
        """Gradients summed over all ranks that hold the same weights; call once, before the optimizer steps."""
        if self._overlaps and self._held_back:
            for chunk in self._model:
                chunk.start_grad_sync()
        self._held_back = False
        finalize_model_grads(self._model)

    def stepped(self) -> None:
        """The optimizer has changed the weights."""
        self._stale = self._gathers_late

    def whole_weights(self) -> None:
        """Wait until every rank holds all its weights: before anything but a forward pass reads them."""
        if self._stale:
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)
        self._stale = False
