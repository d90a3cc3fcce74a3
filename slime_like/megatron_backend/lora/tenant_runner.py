"""Passes of tenants through the model: losses, gradients, and the log-probs of every row on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_like.algorithms.policy_losses import LossBatch
from slime_like.config.run import RunConfig
from slime_like.megatron_backend.lora.segments import TenantAdapters
from slime_like.megatron_backend.lora.tenant_rows import RATIO_MASK, PassShare, RowCutter, RowPack
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.megatron_backend.step.batch import StepCutter
from slime_like.megatron_backend.step.context_parallel import whole
from slime_like.megatron_backend.step.forward import Scoring, device_of, run_model
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.several_targets import log_probs_of_each
from slime_like.records import PassResult, TenantPass


class TenantRunner:
    """Runs the model over rows of tenants whose weights are in place."""

    def __init__(self, config: RunConfig, model: Sequence[torch.nn.Module], adapters: TenantAdapters):
        self._model, self._adapters = list(model), adapters
        self._device = device_of(unwrap(model))
        batch = config.batch
        cutter = StepCutter(config, device=self._device, num_chunks=len(self._model))
        self._cut, self._cut_wide = (RowCutter(cutter, sizes, device=self._device) for sizes in (batch, batch.scoring))
        self._packs_rows = batch.qkv_format != "bshd"
        self.num_micro_batches = self.num_shared_micro_batches = 0  # since the start; shared: of several tenants' rows
        self._scoring = Scoring(
            vocab_size=config.model.vocab_size,
            temperature=1.0,
            chunk_tokens=batch.log_probs_chunk_tokens(on_gpu=self._device.type == "cuda"),
        )

    def can_share(self, names: Sequence[str]) -> bool:
        """Whether rows of these tenants may be in one micro-batch."""
        return self._packs_rows and self._adapters.can_share(names)

    def run(self, passes: Sequence[TenantPass]) -> list[PassResult]:
        """The passes, all with gradients or all without, in shared micro-batches. Collective.

        Gradients are added where the tenants collect them, not yet summed over ranks.
        """
        forward_only = passes[0].forward_only
        packs, starts = (self._cut_wide if forward_only else self._cut)(passes)
        self.num_micro_batches += len(packs)
        self.num_shared_micro_batches += sum(len(pack.shares) > 1 for pack in packs)
        context = torch.no_grad() if forward_only else self._adapters.dropping([order.weights for order in passes])
        with context:
            outputs = self._through(passes, packs, forward_only)
        # Numbers of all rows, and the losses behind them: whoever has one fills it in, and all are told.
        num_targets = sum(row.targets.size for order in passes for row in order.rows)
        log_probs = torch.zeros(num_targets, device=self._device)
        losses = torch.zeros(len(passes), dtype=torch.float64, device=self._device)
        for of_pack in outputs:
            for share, scores, loss in of_pack:
                log_probs.index_copy_(0, share.places, scores)
                losses[share.number] += loss
        for numbers in (log_probs, losses):
            _tell_all(numbers)
        flat, sums = log_probs.cpu().numpy(), losses.tolist()
        return [
            PassResult(
                log_probs=[
                    flat[start : start + row.targets.size].reshape(row.targets.shape).copy()
                    for start, row in zip(starts[number], order.rows, strict=True)
                ],
                metrics={"loss": sums[number]},
            )
            for number, order in enumerate(passes)
        ]

    def _through(self, passes: Sequence[TenantPass], packs: Sequence[RowPack], forward_only: bool) -> list:
        """[(share, its log-probs, its loss) of each pack] on the last pipeline stage, else []."""
        losses = [LossSpec(name=order.loss, config=order.config) for order in passes]
        # The schedule divides by the number of micro-batches and, for averages over all ranks, multiplies by that of
        # context parallel ones; tenants' gradients are summed.
        scale = len(packs) / parallel_state.get_context_parallel_world_size()

        def loss_function(logits: torch.Tensor, pack: RowPack, non_loss_data: bool = False):
            scores = whole(log_probs_of_each(logits, pack.targets, self._scoring), pack.batch.restoring).flatten()
            total, parts = scores.sum() * 0.0, []  # a filler's gradients are zeros
            for share in pack.shares:
                chosen = scores[share.select]
                loss = losses[share.number](_loss_batch(chosen, share)).loss
                total = loss if len(pack.shares) == 1 else total + loss
                parts.append((share, chosen.detach(), loss.detach().double()))
            return parts if non_loss_data else (total * scale, parts)

        def forward_step(remaining, model):
            pack = next(remaining)
            self._adapters.show(pack.segments)
            output = run_model(model, pack.batch)
            if output.requires_grad:
                # layers that are computed again in backward see their own pack's tenants
                output.register_hook(lambda _: self._adapters.show(pack.segments))
            return output, lambda logits, **options: loss_function(logits, pack, **options)

        try:
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(packs) for _ in self._model],
                model=self._model,
                num_microbatches=len(packs),
                seq_length=packs[0].batch.tokens.size(1) * parallel_state.get_context_parallel_world_size(),
                micro_batch_size=packs[0].batch.tokens.size(0),
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            self._adapters.show(())


def failure(order: TenantPass, result: PassResult) -> str | None:
    """Why a pass that ran counts for nothing; None if it does."""
    loss = result.metrics["loss"]
    if math.isfinite(loss) and all(np.isfinite(row).all() for row in result.log_probs):
        return None
    where = [number for number, row in enumerate(result.log_probs) if not np.isfinite(row).all()]
    rows = f"log-probs of rows {where[:5]} are not finite" if where else "all log-probs are finite, its inputs are not"
    return f"the loss {order.loss!r} is {loss}: {rows}. Nothing of the pass is kept."


def _loss_batch(log_probs: torch.Tensor, share: PassShare) -> LossBatch:
    own, columns = log_probs.detach(), share.columns
    return LossBatch(
        log_probs=log_probs,
        entropy=torch.zeros_like(own),
        old_log_probs=columns["logprobs"],
        trainer_log_probs=own,
        engine_log_probs=columns["logprobs"],
        advantages=columns["advantages"],
        sample_of_token=share.row_of_target,
        weights=columns["weights"],
        policy_weights=columns["weights"],
        ratio_mask=columns.get(RATIO_MASK),
    )


def _tell_all(numbers: torch.Tensor) -> None:
    """Sum over the data parallel ranks of the last pipeline stage, then the same on every stage."""
    if parallel_state.is_pipeline_last_stage():
        torch.distributed.all_reduce(numbers, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(numbers, last, group=parallel_state.get_pipeline_model_parallel_group())
