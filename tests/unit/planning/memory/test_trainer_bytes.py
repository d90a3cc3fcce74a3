"""Buffers laid out by hand: 64-element starts, padded ends, and what each data parallel rank owns."""

from __future__ import annotations

import pytest

from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.parameters import Parameter
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes, bucket_elements

BF16 = Precision(weight=2, gradient=4, state=12)
#: Laid out backwards: b at 0 to 30, a at 64 to 164, the end padded to a multiple of lcm(2, 128): 256.
PARAMETERS = [Parameter("a", (10, 10)), Parameter("b", (30,))]


def stage(*, sharded: bool, dp_size: int = 2, parameters=PARAMETERS, bucket: int | None = None) -> StageBytes:
    parallel = ParallelConfig(use_distributed_optimizer=sharded)
    return StageBytes([list(parameters)], parallel, BF16, dp_size=dp_size, expert_dp_size=1, bucket_elements=bucket)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": True}, Precision(weight=2, gradient=4, state=4 + 8)),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, Precision(weight=2, gradient=2, state=4 + 8)),
        ({"bf16": False}, Precision(weight=4, gradient=4, state=8)),
        (
            {"bf16": True, "use_precision_aware_optimizer": True, "accumulate_allreduce_grads_in_fp32": True},
            Precision(weight=2, gradient=4, state=2 + 8),
        ),
        ({"bf16": False, "optimizer_cpu_offload": True}, Precision(weight=4, gradient=4, state=0, host_state=4 + 8)),
    ],
)
def test_bytes_of_an_element(flags: dict, expected: Precision):
    assert Precision.of(OptimizerConfig(**flags)) == expected


def test_the_distributed_optimizer_pads_and_shares():
    both = stage(sharded=True)
    assert both.buffer_elements == 256
    first, second = both.of(0, 0), both.of(1, 0)
    assert first.optimizer == 12 * (30 + (128 - 64)) and second.optimizer == 12 * (164 - 128)
    assert (first.num_parameters, first.weights, first.gradients) == (130, 2 * 256, 4 * 256)


def test_without_it_every_rank_owns_everything():
    rank = stage(sharded=False).of(1, 0)
    assert (rank.weights, rank.gradients, rank.optimizer) == (2 * 130, 4 * 130, 12 * 130)


def test_a_bucket_ends_with_the_parameter_that_fills_it():
    assert stage(sharded=True).num_buckets == 1
    cut = stage(sharded=True, bucket=30)
    assert (cut.num_buckets, cut.buffer_elements) == (2, 128 + 128)  # b alone, then a from 128 to 228
    assert cut.of(0, 0).optimizer == 12 * (30 + 64) and cut.of(1, 0).optimizer == 12 * (0 + 36)


def test_an_embedding_that_stages_share_has_its_own_bucket():
    shared = [Parameter("embedding", (10, 10), shared_embedding=True), Parameter("b", (30,))]
    assert stage(sharded=True, parameters=shared).num_buckets == 2


def test_experts_are_shared_by_their_own_ranks():
    experts = [Parameter("a", (10, 10)), Parameter("e", (30,), expert=True)]
    rank = stage(sharded=True, parameters=experts).of(1, 0)
    assert rank.optimizer == 12 * ((100 - 64) + 30)  # a's bucket of 128 is halved; e is held by one rank


@pytest.mark.parametrize(
    ("overlap", "stage_number", "dp_size", "elements"),
    [(False, 0, 64, None), (True, 1, 64, None), (True, 0, 8, 40_000_000), (True, 0, 64, 64_000_000)],
)
def test_where_buckets_end(overlap: bool, stage_number: int, dp_size: int, elements: int | None):
    assert bucket_elements(ParallelConfig(overlap_grad_reduce=overlap), stage=stage_number, dp_size=dp_size) == elements
