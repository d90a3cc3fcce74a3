"""Rows of clients' losses -> packed micro-batches of one or several tenants, and what was wrong with them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from slime_like.config.batch import BatchConfig
from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.lora.segments import Segment
from slime_like.megatron_backend.step.batch import StepCutter
from slime_like.megatron_backend.step.context_parallel import ContextShare
from slime_like.megatron_backend.step.loss_spec import PLAIN_LOSSES, LossSpec
from slime_like.megatron_backend.step.packing import PackedBatch, pack
from slime_like.records import LossRow, TenantPass, TrainSample

#: Of a row's inputs where it brings none.
_DEFAULTS = {"weights": 1.0, "logprobs": 0.0, "advantages": 0.0}
RATIO_MASK = "sequence_ratio_mask"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassShare:
    """One pass's targets in one pack, E of them, row by row."""

    number: int  # of the pass
    select: torch.Tensor  # [E] int64: where each one's log-prob is among the pack's [tokens, targets a token], flat
    places: torch.Tensor  # [E] int64: where it goes among those of all passes
    row_of_target: torch.Tensor  # [E] int64
    columns: dict[str, torch.Tensor]  # [E] float32 each: weights, logprobs, advantages, perhaps RATIO_MASK


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPack:
    """One micro-batch: what the model reads, and what each of its passes is scored on."""

    batch: PackedBatch
    targets: torch.Tensor  # [R x T, K] int64, of this rank's tokens
    segments: tuple[Segment, ...]
    shares: tuple[PassShare, ...]


def pass_problem(order: TenantPass, model: ModelConfig) -> str | None:
    """What is wrong with a pass by itself; None if nothing is."""
    try:
        LossSpec(name=order.loss, config=order.config)
    except ValueError as error:
        return str(error)
    if order.loss not in PLAIN_LOSSES:
        return f"loss {order.loss!r} is not one that clients have. There are: {', '.join(PLAIN_LOSSES)}."
    if not order.rows:
        return "a pass needs at least one row."
    for number, row in enumerate(order.rows):
        problem = _row_problem(row, order.loss, model)
        if problem:
            return f"row {number}: {problem}"
    return None


def _row_problem(row: LossRow, loss: str, model: ModelConfig) -> str | None:
    spec, length = PLAIN_LOSSES[loss], len(row.tokens)
    if not length or not row.targets.size or row.targets.ndim > 2:
        return (
            f"{length} tokens and targets of shape {row.targets.shape}; there must be some, of one or two dimensions."
        )
    if spec.one_target and row.targets.ndim == 2:
        return f"loss {loss!r} takes one target a position, not {row.targets.shape[1]}."
    if length > model.context_tokens:
        return f"{length} tokens are more than the model's {model.context_tokens}."
    for what, ids in (("token", row.tokens), ("target", row.targets)):
        if ids.min() < 0 or ids.max() >= model.vocab_size:
            return f"{what} ids from {ids.min()} to {ids.max()} are not all in the vocabulary of {model.vocab_size}."
    if missing := [name for name in spec.reads if name not in row.inputs]:
        return f"loss {loss!r} needs {', '.join(missing)}."
    odd = {name: array.shape for name, array in row.inputs.items() if array.shape != row.targets.shape}
    return f"arrays of other shapes than the targets' {row.targets.shape}: {odd}." if odd else None


class RowCutter:
    """Shares rows out over data parallel ranks and packs this rank's into micro-batches.

    How the rows of one pass are cut depends on no other pass where it is alone.
    """

    def __init__(self, cutter: StepCutter, sizes: BatchConfig, *, device: torch.device):
        self._cutter, self._sizes, self._device = cutter, sizes, device

    def __call__(self, passes: Sequence[TenantPass]) -> tuple[list[RowPack], list[list[int]]]:
        """(this rank's packs, where the log-probs of each pass's rows begin among those of all).

        The places of all passes end where the last row's do.
        """
        owners = [(number, index) for number, order in enumerate(passes) for index in range(len(order.rows))]
        rows = [passes[number].rows[index] for number, index in owners]
        ends = [0, *itertools.accumulate(row.targets.size for row in rows)]
        share = ContextShare.of_this_rank()
        mine = [sorted(indices) for indices in self._cutter.plan([len(r.tokens) for r in rows], share, self._sizes)]
        layout = self._cutter.layout_of([[len(rows[i].tokens) for i in indices] for indices in mine], share)
        samples = [_as_sample(row) for row in rows]
        packs = []
        for indices in mine:
            lengths = [len(rows[i].tokens) for i in indices]
            segments = layout.segments(lengths, share)
            local = share.local(segments)
            packs.append(
                RowPack(
                    batch=pack(
                        samples, indices, np.zeros(len(rows)), layout=layout, device=self._device, context=share
                    ),
                    targets=self._targets([rows[i] for i in indices], segments, local),
                    segments=_runs([passes[owners[i][0]].weights for i in indices], segments, local, passes),
                    shares=self._shares(indices, rows, owners, ends),
                )
            )
        starts: list[list[int]] = [[] for _ in passes]
        for (number, _), start in zip(owners, ends, strict=False):
            starts[number].append(start)
        return packs, starts

    def _targets(self, rows: Sequence[LossRow], segments: Sequence[int], local: np.ndarray) -> torch.Tensor:
        """[R x T, K] of this rank's tokens, zeros where a token has fewer."""
        most = max((_width(row) for row in rows), default=1)
        whole, start = np.zeros((sum(segments), most), dtype=np.int64), 0
        for row, segment in zip(rows, segments, strict=False):
            whole[start : start + len(row.tokens), : _width(row)] = row.targets.reshape(len(row.tokens), -1)
            start += segment
        return torch.as_tensor(whole[local], device=self._device)

    def _shares(
        self, indices: Sequence[int], rows: Sequence[LossRow], owners: Sequence[tuple[int, int]], ends: Sequence[int]
    ) -> tuple[PassShare, ...]:
        most = max((_width(rows[i]) for i in indices), default=1)
        starts = [0, *itertools.accumulate(len(rows[i].tokens) for i in indices)]
        shares = []
        for number in sorted({owners[i][0] for i in indices}):
            own = [(start, i) for start, i in zip(starts, indices, strict=False) if owners[i][0] == number]
            select = [
                ((start + np.arange(len(rows[i].tokens)))[:, None] * most + np.arange(_width(rows[i]))).ravel()
                for start, i in own
            ]
            of_pass = [rows[i] for _, i in own]
            names = [*_DEFAULTS] + ([RATIO_MASK] if all(RATIO_MASK in row.inputs for row in of_pass) else [])
            columns = {name: np.concatenate([_column(row, name) for row in of_pass]) for name in names}
            shares.append(
                PassShare(
                    number=number,
                    select=self._on_device(np.concatenate(select)),
                    places=self._on_device(np.concatenate([np.arange(ends[i], ends[i + 1]) for _, i in own])),
                    row_of_target=self._on_device(
                        np.repeat(np.arange(len(own)), [rows[i].targets.size for _, i in own])
                    ),
                    columns={name: self._on_device(column) for name, column in columns.items()},
                )
            )
        return tuple(shares)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


def _width(row: LossRow) -> int:
    return 1 if row.targets.ndim == 1 else row.targets.shape[1]


def _column(row: LossRow, name: str) -> np.ndarray:
    if name in row.inputs:
        return np.asarray(row.inputs[name], dtype=np.float32).ravel()
    return np.full(row.targets.size, _DEFAULTS[name], dtype=np.float32)


def _as_sample(row: LossRow) -> TrainSample:
    """What packing reads of a row: its tokens."""
    nothing = np.zeros(len(row.tokens), dtype=np.float32)
    return TrainSample(
        prompt_index=0,
        sample_index=0,
        tokens=row.tokens,
        loss_mask=nothing.astype(np.int8),
        engine_logprobs=nothing,
        weight_versions=nothing.astype(np.int32),
        reward=0.0,
        advantages=nothing,
        weights=nothing,
    )


def _runs(
    names: Sequence[str], segments: Sequence[int], local: np.ndarray, passes: Sequence[TenantPass]
) -> tuple[Segment, ...]:
    """Whose this rank's tokens are; padding passes for the tokens before it, a filler for the first pass's."""
    known = list(dict.fromkeys(order.weights for order in passes))
    of_segment = [known.index(name) for name in names]
    of_segment += [of_segment[-1] if of_segment else 0] * (len(segments) - len(of_segment))
    owner = np.repeat(of_segment, segments)[local]
    cuts = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return tuple(Segment(known[int(owner[first])], first, end) for first, end in zip(cuts, cuts[1:], strict=False))
