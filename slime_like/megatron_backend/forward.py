"""Logits of a vocabulary-parallel model -> log-prob and entropy per token, in fp32."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from slime_like.megatron_backend.packing import PackedBatch


def run_model(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """This stage's output for one pack: logits [1, T, V / tensor parallel size] on the last stage, activations before it."""
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences)


def log_probs_and_entropy(logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [T] and entropy in nats [T], of softmax(logits / temperature) over the real vocabulary.

    logits: [1, T, V / tensor parallel size], targets: [T]. Equal on every tensor parallel rank; differentiable once.
    """
    local = logits.squeeze(0).float() / temperature
    first = parallel_state.get_tensor_model_parallel_rank() * local.size(-1)
    padding = first + local.size(-1) - vocab_size
    if padding > 0:
        keep = torch.arange(first, first + local.size(-1), device=local.device) < vocab_size
        local = local.masked_fill(~keep, float("-inf"))
    return _VocabParallelLogProb.apply(local, targets, first, parallel_state.get_tensor_model_parallel_group())


class _VocabParallelLogProb(torch.autograd.Function):
    """Log-softmax at the target and entropy, without gathering the vocabulary. Keeps one [T, V / tp] tensor for backward."""

    @staticmethod
    def forward(ctx, logits, targets, first, group):
        maximum = logits.max(-1).values.contiguous()
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
        shifted = logits - maximum[:, None]
        probs = shifted.exp()
        local_targets = targets - first
        mine = (local_targets >= 0) & (local_targets < logits.size(-1))
        local_targets = local_targets.clamp(0, logits.size(-1) - 1)
        at_target = torch.where(mine, shifted.gather(-1, local_targets[:, None]).squeeze(-1), 0.0)
        # Padding columns are -inf with probability 0; their product is nan and stands for 0.
        mean_logit = torch.where(probs > 0, probs * shifted, 0.0).sum(-1)
        sums = torch.stack([probs.sum(-1), at_target, mean_logit])
        torch.distributed.all_reduce(sums, group=group)
        total, at_target, mean_logit = sums
        log_total = total.log()
        probs /= total[:, None]
        entropy = log_total - mean_logit / total
        ctx.save_for_backward(probs, local_targets, mine, entropy)
        ctx.set_materialize_grads(False)
        return at_target - log_total, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        probs, local_targets, mine, entropy = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_log_prob is not None:
            grad -= probs * grad_log_prob[:, None]
            grad.scatter_add_(-1, local_targets[:, None], (grad_log_prob * mine)[:, None])
        if grad_entropy is not None:
            # dH/dz = -p (log p + H); xlogy is 0 where p is 0.
            grad -= (torch.xlogy(probs, probs) + probs * entropy[:, None]) * grad_entropy[:, None]
        return grad, None, None, None


def device_of(stage: GPTModel) -> torch.device:
    """Where the stage's parameters live."""
    return next(stage.parameters()).device
