"""Logits of a vocabulary-parallel model -> log-prob and entropy per token, in fp32."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from slime_like.megatron_backend.step.packing import PackedBatch, Predictions

#: Logits that are worked on at once on the host.
HOST_ELEMENTS = 1 << 19


def run_model(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """This chunk's output for one pack, in the model's type: logits [R, T, V / tensor parallel size] from the last,
    activations before it.
    """
    # Blocks of bf16 logits are made fp32 one after another; a whole fp32 copy would be twice as large as they are.
    options = {"fp32_output": False} if get_model_config(model).bf16 else {}
    padding = _padding_for_routers(model, batch)
    return model(
        batch.tokens, batch.positions, None, packed_seq_params=batch.sequences, padding_mask=padding, **options
    )


def _padding_for_routers(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor | None:
    """What routers leave out of their balancing, as GPTModel wants it. It still passes through the experts."""
    config = get_model_config(model)
    if batch.padding is None or not config.num_moe_experts:
        return None
    if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        # Only the first pipeline stage shares it out (0.16.1).
        return batch.padding.chunk(parallel_state.get_tensor_model_parallel_world_size(), 1)[
            parallel_state.get_tensor_model_parallel_rank()
        ]
    return batch.padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How logits become probabilities, and how many tokens at a time (None: all)."""

    vocab_size: int
    temperature: float
    chunk_tokens: int | None = None


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, scoring: Scoring, predictions: Predictions | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [R x T] and entropy in nats [R x T], of softmax(logits / temperature) over the real vocabulary.

    logits: [R, T, V / tensor parallel size], targets: [R x T]. Equal on every tensor parallel rank; differentiable
    once. The gradient takes the place of logits that an operation made, so nobody else may look at these after
    backward; a leaf is left alone. Beside both at most two [chunk_tokens, V / tp] fp32 tensors are alive, on the host
    far less.
    predictions: which logits are about which target, where some are about several, whose gradients add up. With it
    targets and what comes back are [P].
    """
    replaces = logits.requires_grad and not logits.is_leaf
    # Megatron has turned [T, R] into [R, T]. Of one row it gets back a gradient that lies as [T, R] does, by turning it
    # here: else a frozen output layer's product is T products, each with a copy of the weight (torch's matmul looks at
    # the strides of dimensions of one, too).
    rows = logits.transpose(0, 1).flatten(0, 1) if len(logits) == 1 else logits.flatten(0, 1)
    log_probs, entropy = _VocabParallelLogProb.apply(
        rows, targets, scoring, parallel_state.get_tensor_model_parallel_group(), replaces, predictions
    )
    return log_probs, entropy if predictions is None else entropy[predictions.rows]


class _VocabParallelLogProb(torch.autograd.Function):
    """Log-softmax at the target and entropy, without gathering the vocabulary; probabilities are computed again for
    backward.

    All passes over one block of rows come before the next block: on the host it stays in the core's cache. Ranks tell
    each other a few numbers a row, of all rows at once.
    """

    @staticmethod
    def forward(ctx, logits, targets, scoring, group, replaces, predictions):
        columns = _Columns.of_this_rank(logits.size(-1), scoring)
        highest, total, mean_logit = (logits.new_zeros(logits.size(0), dtype=torch.float32) for _ in range(3))
        at_target = logits.new_zeros(len(targets), dtype=torch.float32)
        highest.fill_(torch.finfo(torch.float32).min)
        blocks = _blocks(logits, scoring.chunk_tokens) if columns.width else []
        scratch = _Scratch(logits, blocks, columns.width)
        for rows in blocks:
            scaled, is_copy = columns.scaled(logits[rows], scratch)
            torch.amax(scaled, -1, out=highest[rows])
            shifted = torch.sub(scaled, highest[rows, None], out=scaled if is_copy else scratch.like(scaled, 0))
            if predictions is None:
                mine, at = columns.find(targets[rows])
                at_target[rows] = torch.where(mine, shifted.gather(-1, at[:, None]).squeeze(-1), 0.0)
            else:
                wanted, row = predictions.within(rows)
                mine, at = columns.find(targets[wanted])
                at_target[wanted] = torch.where(mine, shifted[row, at], 0.0)
            probs = torch.exp(shifted, out=scratch.like(shifted, 1))
            torch.sum(probs, -1, out=total[rows])
            torch.sum(probs.mul_(shifted), -1, out=mean_logit[rows])
        if group.size() > 1:
            own = highest.clone()
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
            below = own.sub_(highest)  # where this rank counted from, seen from the highest of all
            at_target += torch.where(
                columns.find(targets)[0], below if predictions is None else below[predictions.rows], 0.0
            )
            sums = torch.cat([total * below.exp(), (mean_logit + below * total) * below.exp(), at_target])
            torch.distributed.all_reduce(sums, group=group)
            total, mean_logit, at_target = sums.split([len(total), len(total), len(targets)])
        log_total = total.log()
        entropy = log_total - mean_logit / total
        ctx.save_for_backward(logits, targets, highest.add_(log_total), entropy)
        ctx.columns, ctx.chunk_tokens, ctx.replaces, ctx.predictions = (
            columns,
            scoring.chunk_tokens,
            replaces,
            predictions,
        )
        ctx.set_materialize_grads(False)
        return at_target - (log_total if predictions is None else log_total[predictions.rows]), entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        logits, targets, normalizer, entropy = ctx.saved_tensors
        columns: _Columns = ctx.columns
        predictions: Predictions | None = ctx.predictions
        of_targets = grad_log_prob
        if predictions is not None and grad_log_prob is not None:
            grad_log_prob = torch.zeros_like(entropy).index_add_(0, predictions.rows, grad_log_prob)
        # An entropy that a user's loss only measured. A GPU is not asked: it would have to finish everything first.
        if not logits.is_cuda and not (grad_entropy is None or grad_log_prob is None or grad_entropy.any()):
            grad_entropy = None
        per_row = [None if grad is None else grad / columns.temperature for grad in (grad_log_prob, grad_entropy)]
        grad = logits if ctx.replaces else torch.empty_like(logits)
        blocks = _blocks(logits, ctx.chunk_tokens) if columns.width else []
        scratch = _Scratch(logits, blocks, columns.width)
        for rows in blocks:
            by_log_prob, by_entropy = (_column(values, rows) for values in per_row)
            wanted, row = (rows, None) if predictions is None else predictions.within(rows)
            if not logits.is_cuda and by_entropy is None and not of_targets[wanted].any():
                grad[rows] = 0.0  # tokens that are not trained on
                continue
            scaled, is_copy = columns.scaled(logits[rows], scratch)
            place = grad[rows, : columns.width]
            part = torch.sub(scaled, normalizer[rows, None], out=scaled if is_copy else place)
            # dH/dz = -p (log p + H), d log p(target)/dz = [target] - p; each step in place: passes over the vocabulary
            # cost time and memory.
            if by_entropy is None:
                part.exp_().mul_(-by_log_prob)
            else:
                probs = torch.exp(part, out=scratch.like(part, 1))
                part.add_(entropy[rows, None]).mul_(-by_entropy)
                if by_log_prob is not None:
                    part.sub_(by_log_prob)
                part.mul_(probs)
            if by_log_prob is not None:
                mine, at = columns.find(targets[wanted])
                if row is None:
                    part.scatter_add_(-1, at[:, None], by_log_prob * mine[:, None])
                else:
                    each = of_targets[wanted] / columns.temperature * mine
                    part.index_put_((row, at), each, accumulate=True)
            if is_copy:
                place.copy_(part)
        grad[:, columns.width :] = 0.0
        return grad, None, None, None, None, None


class _Scratch:
    """Two [longest block, width] fp32 tensors in which one block after another is worked on: on the host, memory that
    was never touched costs more than the work.
    """

    def __init__(self, logits: torch.Tensor, blocks: list[slice], width: int):
        self._logits, self._shape = logits, (max((b.stop - b.start for b in blocks), default=0), width)
        self._kept: dict[int, torch.Tensor] = {}

    def like(self, block: torch.Tensor, number: int) -> torch.Tensor:
        """Number 0 or 1, in the shape of a block."""
        if number not in self._kept:
            self._kept[number] = self._logits.new_empty(self._shape, dtype=torch.float32)
        return self._kept[number][: len(block)]


def _column(values, rows: slice):
    """[rows, 1] of a gradient that autograd gave; None if it gave none."""
    return None if values is None else values[rows, None]


@dataclasses.dataclass(frozen=True)
class _Columns:
    """This rank's columns of the logits, padding left out."""

    first: int  # in the vocabulary
    width: int
    temperature: float

    @classmethod
    def of_this_rank(cls, width: int, scoring: Scoring) -> _Columns:
        """width: padding included."""
        first = parallel_state.get_tensor_model_parallel_rank() * width
        return cls(first, min(max(scoring.vocab_size - first, 0), width), scoring.temperature)

    def scaled(self, logits: torch.Tensor, scratch: _Scratch) -> tuple[torch.Tensor, bool]:
        """([rows, width] fp32 logits / temperature, whether they are a copy, in the first scratch)."""
        local = logits[:, : self.width]
        copy = scratch.like(local, 0).copy_(local) if local.dtype != torch.float32 else None
        if self.temperature != 1.0:
            copy = torch.div(local if copy is None else copy, self.temperature, out=scratch.like(local, 0))
        return (local, False) if copy is None else (copy, True)

    def find(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether each target lies in these columns, its column or a valid stand-in)."""
        local = targets - self.first
        return (local >= 0) & (local < self.width), local.clamp(0, max(self.width - 1, 0))


def _blocks(logits: torch.Tensor, chunk_tokens: int | None) -> list[slice]:
    """Rows that are passed over together: at most chunk_tokens, on the host also as many as a cache holds."""
    count, width = logits.shape
    size = min(chunk_tokens or count, count)
    if not logits.is_cuda:
        size = min(size, HOST_ELEMENTS // width)
    size = max(size, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def device_of(stage: torch.nn.Module) -> torch.device:
    """Where the stage's parameters live."""
    return next(stage.parameters()).device
