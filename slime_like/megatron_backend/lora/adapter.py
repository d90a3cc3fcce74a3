"""What is added to one parallel linear layer: for each HF module in it B A x, scaled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN, ROW
from slime_like.megatron_backend.hf.tables.row import GATE_UP_JOINED, QKV


class AdapterSwitch:
    """Whether the adapters of a model count just now, and whether they drop some of their input."""

    def __init__(self, config: LoraConfig):
        self.config = config
        self.is_on, self.drops = True, False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its frozen base."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, as in train steps, --lora-dropout counts."""
        before, self.drops = self.drops, True
        try:
            yield
        finally:
            self.drops = before


def dropping(switch: AdapterSwitch | None) -> contextlib.AbstractContextManager:
    """Inside, --lora-dropout counts, where there are adapters."""
    return contextlib.nullcontext() if switch is None else switch.dropping()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """The layer that an adapter belongs to, as this rank holds it.

    layout: of its rows (hf/tables/row.py). sizes: [rows of each HF module here], those without an adapter too.
    """

    split: str  # config/lora_targets.py
    layout: str
    sizes: tuple[int, ...]
    num_inputs: int  # here
    rank: int
    scale: float
    dropout: float
    group: torch.distributed.ProcessGroup  # tensor parallel; of an expert the experts'
    num_local_experts: int = 0  # on this rank; 0: the layer is no expert's
    num_rows: int | None = None  # HF's of all ranks together, where Megatron pads them: the vocabulary

    @property
    def is_expert(self) -> bool:
        """Whether the layer is one of an expert's: tokens come to it gathered, and what it gives is summed later."""
        return self.num_local_experts > 0


class _SummedGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is summed over the ranks of a group. Megatron's own (0.16.1, mappings.py) loses
    the sum of a gradient that is not contiguous.
    """

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.group.size() == 1:
            return gradient, None
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class AdapterPart(torch.nn.Module):
    """A [rank, inputs] and B [outputs, rank] of one HF module, as this rank holds them.

    Of a layer that is split by rows A is whole on every tensor parallel rank and B split; by columns the other way
    round; with sequence parallelism the gradients of what is whole are summed over the ranks, each of which saw its
    part of the tokens. An expert's ranks saw the same tokens, and sum these gradients as they come (LoraAdapter).
    """

    def __init__(self, module: str, shape: AdapterShape, num_outputs: int, config: TransformerConfig):
        super().__init__()
        self.module = module  # whole HF name
        self.lora_a = torch.nn.Parameter(torch.zeros(shape.rank, shape.num_inputs, dtype=config.params_dtype))
        self.lora_b = torch.nn.Parameter(torch.zeros(num_outputs, shape.rank, dtype=config.params_dtype))
        shared = {COLUMN: (self.lora_b, 0), ROW: (self.lora_a, 1)}.get(shape.split)
        if shape.is_expert:
            assert shared is not None, "experts' layers are split by rows or columns"
            for matrix in (self.lora_a, self.lora_b):
                # As Megatron marks experts' weights: other buffers where ranks hold other experts. Of what is whole
                # one rank's counts in the norm.
                matrix.allreduce = config.expert_model_parallel_size == 1
                counts = matrix is shared[0] or shape.group.rank() == 0
                set_tensor_model_parallel_attributes(matrix, counts, shared[1], 1)
            return
        if shared is not None and shape.group.size() > 1:
            set_tensor_model_parallel_attributes(shared[0], True, shared[1], 1)
        for matrix in (self.lora_a, self.lora_b):
            if shared is None or matrix is not shared[0]:
                matrix.sequence_parallel = config.sequence_parallel


class LoraAdapter(torch.nn.Module):
    """The adapters of one linear layer of Megatron's, which may be several HF modules in one.

    parts: by place among the layer's HF modules; some may have none.
    """

    def __init__(
        self, shape: AdapterShape, parts: dict[int, AdapterPart], config: TransformerConfig, switch: AdapterSwitch
    ):
        super().__init__()
        self.shape, self._switch = shape, switch
        self._sequence_parallel, self._head_size = config.sequence_parallel, config.kv_channels
        self.places = tuple(parts)
        for part in parts.values():
            self.add_module(part.module.rsplit(".", 1)[-1], part)

    @property
    def counts(self) -> bool:
        """Whether the model is more than its base just now."""
        return self._switch.is_on

    @property
    def parts(self) -> dict[int, AdapterPart]:
        """By place among the layer's HF modules."""
        return dict(zip(self.places, self.children(), strict=True))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the layer's output [..., rows here] gains for its input [..., inputs here]; None while switched off."""
        if not self.counts:
            return None
        parts = self.parts
        narrow = self.between_ranks(self.narrowed(hidden, list(parts.values())))
        gains: list[torch.Tensor | None] = [None] * len(self.shape.sizes)
        for (place, part), inner in zip(parts.items(), narrow.split(self.shape.rank, -1), strict=True):
            gains[place] = functional.linear(inner, self.whole(part.lora_b, COLUMN)) * self.shape.scale
        return self.joined(gains, narrow)

    def delta(self) -> torch.Tensor:
        """What the layer's weight [rows here, inputs here] gains, in fp32: scale B A of each HF module."""
        rows = [
            (part.lora_b.float() @ part.lora_a.float()) * self.shape.scale if part is not None else None
            for part in map(self.parts.get, range(len(self.shape.sizes)))
        ]
        like = next(row for row in rows if row is not None)
        return self.joined([None if row is None else row.T for row in rows], like.T).T.contiguous()

    def whole(self, matrix: torch.Tensor, split: str) -> torch.Tensor:
        """A matrix of an expert that its tensor parallel ranks each have all of, unless the layer is split like this:
        the gradient is summed over them.
        """
        if not self.shape.is_expert or self.shape.split == split:
            return matrix
        return _SummedGradient.apply(matrix, self.shape.group)

    def narrowed(self, hidden: torch.Tensor, parts: Sequence[AdapterPart]) -> torch.Tensor:
        """[..., parts x rank]: A x of each part."""
        if not (self._switch.drops and self.shape.dropout):
            return functional.linear(hidden, self.whole(torch.cat([part.lora_a for part in parts]), ROW))
        # Ranks that see the same input drop the same of it, others something else: as Megatron's own dropout.
        own = self.shape.split == ROW or self._sequence_parallel
        with get_cuda_rng_tracker().fork() if own else contextlib.nullcontext():
            return torch.cat(
                [functional.linear(functional.dropout(hidden, self.shape.dropout), part.lora_a) for part in parts], -1
            )

    def between_ranks(self, narrow: torch.Tensor) -> torch.Tensor:
        """What tensor parallel ranks exchange: a few numbers a token, in forward or in backward."""
        split, group, sequence = self.shape.split, self.shape.group, self._sequence_parallel
        if self.shape.is_expert:
            return narrow
        if split == COLUMN and sequence:
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=group)
        if split == COLUMN:
            return copy_to_tensor_model_parallel_region(narrow, group=group)
        if split == ROW and sequence:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=group)
        if split == ROW:
            return reduce_from_tensor_model_parallel_region(narrow, group=group)
        return narrow

    def joined(self, gains: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """[..., rows] of the layer in Megatron's order, from those of its HF modules; zeros where there is none."""
        columns = [
            like.new_zeros(*like.shape[:-1], size) if gain is None else gain
            for gain, size in zip(gains, self.shape.sizes, strict=True)
        ]
        if len(columns) == 1:
            return columns[0]
        if self.shape.layout != QKV:
            return torch.cat(columns, -1)
        # Megatron keeps each group together: its query heads, then its key, then its value.
        groups = self.shape.sizes[1] // self._head_size
        by_group = [x.reshape(*x.shape[:-1], groups, -1) for x in columns]
        return torch.cat(by_group, -1).flatten(-2)

    def halves(self) -> bool:
        """Whether B's rows here are two parts of the HF module's, gate's and up's, each split over the ranks."""
        return self.shape.layout == GATE_UP_JOINED
