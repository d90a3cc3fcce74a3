"""Logits of a vocabulary-parallel model -> log-prob and entropy per token, in fp32."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from slime_like.megatron_backend.packing import PackedBatch


def run_model(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """This stage's output for one pack: logits [1, T, V / tensor parallel size] on the last stage, activations before it."""
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How logits become probabilities, and how many tokens at a time (None: all)."""

    vocab_size: int
    temperature: float
    chunk_tokens: int | None = None


def log_probs_and_entropy(logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [T] and entropy in nats [T], of softmax(logits / temperature) over the real vocabulary.

    logits: [1, T, V / tensor parallel size], targets: [T]. Equal on every tensor parallel rank; differentiable once.
    Beside the logits and, in backward, their gradient, at most a few [chunk_tokens, V / tp] fp32 tensors are alive.
    """
    return _VocabParallelLogProb.apply(logits.squeeze(0), targets, scoring, parallel_state.get_tensor_model_parallel_group())


class _VocabParallelLogProb(torch.autograd.Function):
    """Log-softmax at the target and entropy, without gathering the vocabulary; probabilities are computed again for backward."""

    @staticmethod
    def forward(ctx, logits, targets, scoring, group):
        first = parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
        maximum, log_total, log_prob, entropy = (logits.new_empty(logits.size(0), dtype=torch.float32) for _ in range(4))
        for rows in _chunks(logits.size(0), scoring.chunk_tokens):
            local = _scaled(logits[rows], first, scoring)
            highest = local.max(-1).values.contiguous()
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
            shifted = local.sub_(highest[:, None])
            mine, at = _local_targets(targets[rows], first, logits.size(-1))
            at_target = torch.where(mine, shifted.gather(-1, at[:, None]).squeeze(-1), 0.0)
            probs = shifted.exp()
            # Padding columns are -inf with probability 0; their product is nan and stands for 0.
            mean_logit = torch.where(probs > 0, probs * shifted, 0.0).sum(-1)
            sums = torch.stack([probs.sum(-1), at_target, mean_logit])
            torch.distributed.all_reduce(sums, group=group)
            total, at_target, mean_logit = sums
            maximum[rows], log_total[rows] = highest, total.log()
            log_prob[rows], entropy[rows] = at_target - log_total[rows], log_total[rows] - mean_logit / total
        ctx.save_for_backward(logits, targets, maximum, log_total, entropy)
        ctx.scoring, ctx.first = scoring, first
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, targets, maximum, log_total, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _chunks(logits.size(0), ctx.scoring.chunk_tokens):
            probs = _scaled(logits[rows], ctx.first, ctx.scoring).sub_((maximum + log_total)[rows, None]).exp_()
            part = torch.zeros_like(probs)
            if grad_log_prob is not None:
                mine, at = _local_targets(targets[rows], ctx.first, logits.size(-1))
                part -= probs * grad_log_prob[rows, None]
                part.scatter_add_(-1, at[:, None], (grad_log_prob[rows] * mine)[:, None])
            if grad_entropy is not None:
                # dH/dz = -p (log p + H); xlogy is 0 where p is 0.
                part -= (torch.xlogy(probs, probs) + probs * entropy[rows, None]) * grad_entropy[rows, None]
            grad[rows] = part.div_(ctx.scoring.temperature).to(grad.dtype)
        return grad, None, None, None


def _chunks(count: int, size: int | None) -> list[slice]:
    size = size or max(count, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled(logits: torch.Tensor, first: int, scoring: Scoring) -> torch.Tensor:
    """A fp32 copy of the logits / temperature, -inf at padding columns. `first`: the vocabulary index of column 0."""
    local = logits.to(torch.float32, copy=True).div_(scoring.temperature)
    if first + local.size(-1) > scoring.vocab_size:
        padding = torch.arange(first, first + local.size(-1), device=local.device) >= scoring.vocab_size
        local.masked_fill_(padding, float("-inf"))
    return local


def _local_targets(targets: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each target lies in this rank's columns, its column or a valid stand-in)."""
    local = targets - first
    return (local >= 0) & (local < width), local.clamp(0, width - 1)


def device_of(stage: GPTModel) -> torch.device:
    """Where the stage's parameters live."""
    return next(stage.parameters()).device
