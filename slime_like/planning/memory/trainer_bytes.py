"""Parameters of one rank -> exact bytes of weights, gradients and optimizer state, as megatron-core 0.16.1 lays them
out.

Parameters lie one behind the other, the model's last first, in a gradient buffer (and with the distributed optimizer in
a weight buffer as well). With the distributed optimizer each parameter starts at a multiple of 64 elements, each bucket
ends at a multiple of lcm(data parallel size, 128), and each data parallel rank owns an equal slice of every bucket: the
elements of parameters in its slice, not the padding, have optimizer state (distributed/param_and_grad_buffer.py,
optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.parameters import Parameter

#: Adam's two moments in fp32.
_MOMENT_BYTES = 4 + 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one element."""

    weight: int
    gradient: int
    state: int  # optimizer, on the GPU
    host_state: int = 0  # optimizer, in the host's memory

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> Precision:
        """bf16 (the default on GPUs) has fp32 main weights in the optimizer; fp32 trains its weights themselves.

        Precision-aware: transformer-engine's Adam keeps only the 16 bits that bf16 weights lack of the fp32 main
        weights (store_param_remainders, its default since 2.1).
        """
        bf16 = optimizer.bf16 is not False
        main = (
            (2 if optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload else 4) if bf16 else 0
        )
        state = main + _MOMENT_BYTES
        if optimizer.optimizer_cpu_offload:
            # The host also keeps a copy of fp32 weights to step on.
            return cls(
                weight=2 if bf16 else 4,
                gradient=_gradient_bytes(optimizer),
                state=0,
                host_state=max(state, 4 + _MOMENT_BYTES),
            )
        return cls(weight=2 if bf16 else 4, gradient=_gradient_bytes(optimizer), state=state)


def _gradient_bytes(optimizer: OptimizerConfig) -> int:
    return 4 if optimizer.accumulate_allreduce_grads_in_fp32 or optimizer.bf16 is False else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerBytes:
    """What one trainer rank holds. host_optimizer lies in the host's memory, everything else on the GPU."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """Where the parameters of one group lie.

    `bounds` are the buckets' ends, `starts` and `filled` say how many elements lie before.
    """

    numel: int
    bounds: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    filled: tuple[int, ...]  # parameter elements in all parameters before this one

    def elements_before(self, position: int) -> int:
        """Elements of parameters, not padding, that lie before `position`."""
        index = bisect.bisect_right(self.starts, position) - 1
        return 0 if index < 0 else self.filled[index] + min(position, self.ends[index]) - self.starts[index]

    def owned(self, rank: int, size: int) -> int:
        """Elements of parameters in data parallel rank `rank`'s slice of every bucket."""
        total = 0
        for start, end in self.bounds:
            part = (end - start) // size
            total += self.elements_before(start + (rank + 1) * part) - self.elements_before(start + rank * part)
        return total


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bucket_elements(parallel: ParallelConfig, *, stage: int, dp_size: int) -> int | None:
    """Where Megatron cuts the buffer of a stage's first chunk; None: nowhere, since gradients are not reduced during
    the backward pass, or on later stages, whose collectives nobody waits for (DistributedDataParallel).
    """
    return max(40_000_000, 1_000_000 * dp_size) if parallel.overlap_grad_reduce and stage == 0 else None


def _lay_out(parameters: Iterable[Parameter], dp_size: int, *, padded: bool, bucket_elements: int | None) -> _Buffer:
    """Megatron's placement of one group of parameters. padded: with the distributed optimizer.

    An embedding that two stages share has a bucket of its own; else a bucket ends with the parameter that fills it
    (None: none does).
    """
    end_multiple = math.lcm(dp_size, 128) if padded else 1
    position = bucket_start = 0
    open_bucket = False
    bounds, starts, ends, sizes = [], [], [], []

    def close(end: int) -> int:
        nonlocal bucket_start, open_bucket
        end = _up(end, end_multiple)
        bounds.append((bucket_start, end))
        bucket_start, open_bucket = end, False
        return end

    for parameter in reversed(list(parameters)):
        alone = parameter.shared_embedding and padded
        position = _up(position, 64) if padded else position
        if alone and open_bucket:
            position = close(position)
        starts.append(position)
        sizes.append(parameter.numel)
        position += parameter.numel
        ends.append(position)
        open_bucket = True
        if alone or (bucket_elements is not None and position - bucket_start >= bucket_elements):
            position = close(position)
    if open_bucket:
        position = close(position)
    return _Buffer(position, tuple(bounds), tuple(starts), tuple(ends), tuple(accumulate(sizes, initial=0))[:-1])


class StageBytes:
    """The bytes of every data parallel rank of one pipeline stage; `of` answers for one of them."""

    def __init__(
        self,
        chunks: Sequence[list[Parameter]],
        parallel: ParallelConfig,
        precision: Precision,
        *,
        dp_size: int,
        expert_dp_size: int,
        bucket_elements: int | None = None,
        frozen_elements: int = 0,
    ):
        """dp_size counts context parallel ranks too; both groups are Megatron's.

        chunks: what is trained. bucket_elements: of the first chunk, see bucket_elements(). frozen_elements: weights
        beside, which have nothing but themselves.
        """
        self._frozen = frozen_elements
        self._precision, self._sharded = precision, parallel.use_distributed_optimizer
        self._num_parameters = sum(p.numel for chunk in chunks for p in chunk)
        self._dense: list[_Buffer] = []
        self._experts: list[_Buffer] = []
        for number, chunk in enumerate(chunks):
            dense, experts = [p for p in chunk if not p.expert], [p for p in chunk if p.expert]
            bucket = bucket_elements if number == 0 else None
            self._dense.append(_lay_out(dense, dp_size, padded=self._sharded, bucket_elements=bucket))
            self._experts.append(_lay_out(experts, expert_dp_size, padded=self._sharded, bucket_elements=bucket))
        self._dp_size, self._expert_dp_size = dp_size, expert_dp_size
        self.num_buckets = sum(len(buffer.bounds) for buffer in self._dense + self._experts)

    @property
    def buffer_elements(self) -> int:
        """Elements of the gradient buffers, padding counted."""
        return sum(buffer.numel for buffer in self._dense + self._experts)

    def of(self, dp_rank: int, expert_dp_rank: int) -> TrainerBytes:
        """One rank, by its place in the data x context parallel group and in the expert data parallel group."""
        precision, owned = self._precision, self._num_parameters
        if self._sharded:
            owned = sum(buffer.owned(dp_rank, self._dp_size) for buffer in self._dense)
            owned += sum(buffer.owned(expert_dp_rank, self._expert_dp_size) for buffer in self._experts)
        return TrainerBytes(
            num_parameters=self._num_parameters + self._frozen,
            weights=precision.weight
            * (self._frozen + (self.buffer_elements if self._sharded else self._num_parameters)),
            gradients=precision.gradient * self.buffer_elements,
            optimizer=precision.state * owned,
            host_optimizer=precision.host_state * owned,
        )
