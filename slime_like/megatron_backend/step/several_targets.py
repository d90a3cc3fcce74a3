"""Log-probs of several tokens at each position of a vocabulary-parallel model."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from slime_like.megatron_backend.step.forward import Scoring, log_probs_and_entropy


def log_probs_of_each(logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[R x T, K] log p(target) under softmax(logits) over the real vocabulary, in fp32.

    logits: [R, T, V / tensor parallel size], targets: [R x T, K]. Equal on every tensor parallel rank, differentiable
    once; with one target a position the gradient takes the logits' place (step/forward.py).
    """
    if targets.size(1) == 1:
        return log_probs_and_entropy(logits, targets[:, 0], scoring)[0][:, None]
    assert scoring.temperature == 1.0, "only the model's own probabilities"
    return _SeveralTargets.apply(
        logits.flatten(0, 1), targets, scoring.vocab_size, parallel_state.get_tensor_model_parallel_group()
    )


class _SeveralTargets(torch.autograd.Function):
    """Log-softmax at some columns; ranks tell each other a few numbers a row."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        first = group.rank() * logits.size(1)
        width = min(max(vocab_size - first, 0), logits.size(1))
        scaled = logits[:, :width].float()
        highest = logits.new_full((logits.size(0),), torch.finfo(torch.float32).min, dtype=torch.float32)
        if width:
            torch.amax(scaled, -1, out=highest)
        if group.size() > 1:
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
        shifted = scaled - highest[:, None]
        mine = (targets >= first) & (targets < first + width)
        at = (targets - first).clamp(0, max(width - 1, 0))
        at_target = torch.where(mine, shifted.gather(1, at), 0.0) if width else torch.zeros_like(targets).float()
        sums = torch.cat([shifted.exp().sum(-1, keepdim=True), at_target], 1)
        if group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        log_total = sums[:, :1].log()
        ctx.save_for_backward(logits, mine, at, log_total + highest[:, None])
        ctx.width = width
        return sums[:, 1:] - log_total

    @staticmethod
    def backward(ctx, gradient):
        logits, mine, at, normalizer = ctx.saved_tensors
        result = torch.zeros_like(logits)
        if ctx.width:
            # d log p(target k) / d logits = [target k] - p, added up over k
            part = (logits[:, : ctx.width].float() - normalizer).exp_().mul_(-gradient.sum(-1, keepdim=True))
            result[:, : ctx.width] = part.scatter_add_(1, at, gradient * mine)
        return result, None, None, None
