"""Logits of a vocabulary-parallel model -> log-prob and entropy per token, in fp32."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from slime_like.megatron_backend.packing import PackedBatch


def run_model(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """This chunk's output for one pack: logits [R, T, V / tensor parallel size] from the last, activations before it."""
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences, padding_mask=_padding_for_routers(model, batch))


def _padding_for_routers(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor | None:
    """What routers leave out of their balancing, as GPTModel wants it. It still passes through the experts."""
    config = get_model_config(model)
    if batch.padding is None or not config.num_moe_experts:
        return None
    if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        # Only the first pipeline stage shares it out (0.16.1).
        return batch.padding.chunk(parallel_state.get_tensor_model_parallel_world_size(), 1)[parallel_state.get_tensor_model_parallel_rank()]
    return batch.padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How logits become probabilities, and how many tokens at a time (None: all)."""

    vocab_size: int
    temperature: float
    chunk_tokens: int | None = None


def log_probs_and_entropy(logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [R x T] and entropy in nats [R x T], of softmax(logits / temperature) over the real vocabulary.

    logits: [R, T, V / tensor parallel size], targets: [R x T]. Equal on every tensor parallel rank; differentiable once.
    Beside the logits and, in backward, their gradient, at most two [chunk_tokens, V / tp] fp32 tensors are alive.
    """
    return _VocabParallelLogProb.apply(logits.flatten(0, 1), targets, scoring, parallel_state.get_tensor_model_parallel_group())


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
            total = probs.sum(-1)
            mean_logit = probs.mul_(_finite(shifted, first, scoring)).sum(-1)
            sums = torch.stack([total, at_target, mean_logit])
            torch.distributed.all_reduce(sums, group=group)
            total, at_target, mean_logit = sums
            maximum[rows], log_total[rows] = highest, total.log()
            log_prob[rows], entropy[rows] = at_target - log_total[rows], log_total[rows] - mean_logit / total
            del local, shifted, probs  # else they live on while the next chunk's are made
        ctx.save_for_backward(logits, targets, maximum, log_total, entropy)
        ctx.scoring, ctx.first = scoring, first
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, targets, maximum, log_total, entropy = ctx.saved_tensors
        if grad_entropy is not None and grad_log_prob is not None and not grad_entropy.any():
            grad_entropy = None  # an entropy that is only measured
        grad = torch.empty_like(logits)
        for rows in _chunks(logits.size(0), ctx.scoring.chunk_tokens):
            log_probs = _scaled(logits[rows], ctx.first, ctx.scoring).sub_((maximum + log_total)[rows, None])
            # dH/dz = -p (log p + H), d log p(target)/dz = [target] - p; each step in place: passes over the vocabulary cost time and memory.
            if grad_entropy is None:
                part = log_probs.exp_().mul_(-grad_log_prob[rows, None])
            else:
                probs = log_probs.exp()
                part = _finite(log_probs, ctx.first, ctx.scoring).add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
                if grad_log_prob is not None:
                    part.sub_(grad_log_prob[rows, None])
                part.mul_(probs)
                del probs
            if grad_log_prob is not None:
                mine, at = _local_targets(targets[rows], ctx.first, logits.size(-1))
                part.scatter_add_(-1, at[:, None], (grad_log_prob[rows] * mine)[:, None])
            grad[rows] = part if ctx.scoring.temperature == 1.0 else part.div_(ctx.scoring.temperature)
            del log_probs, part
        return grad, None, None, None


def _chunks(count: int, size: int | None) -> list[slice]:
    size = size or max(count, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled(logits: torch.Tensor, first: int, scoring: Scoring) -> torch.Tensor:
    """A fp32 copy of the logits / temperature, -inf at padding columns. `first`: the vocabulary index of column 0."""
    local = logits.to(torch.float32, copy=True)
    if scoring.temperature != 1.0:
        local.div_(scoring.temperature)
    if first + local.size(-1) > scoring.vocab_size:
        padding = torch.arange(first, first + local.size(-1), device=local.device) >= scoring.vocab_size
        local.masked_fill_(padding, float("-inf"))
    return local


def _finite(log_values: torch.Tensor, first: int, scoring: Scoring) -> torch.Tensor:
    """The same tensor, -inf of padding columns made 0: their probability is 0, and 0 x -inf would be nan."""
    log_values[:, max(scoring.vocab_size - first, 0) :] = 0.0
    return log_values


def _local_targets(targets: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each target lies in this rank's columns, its column or a valid stand-in)."""
    local = targets - first
    return (local >= 0) & (local < width), local.clamp(0, width - 1)


def device_of(stage: torch.nn.Module) -> torch.device:
    """Where the stage's parameters live."""
    return next(stage.parameters()).device
