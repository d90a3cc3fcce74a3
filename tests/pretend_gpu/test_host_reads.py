"""How often the host waits for the device in a train step: in a layer, a micro-batch and a step.

Each wait empties the device's queue of work; on the CPU it costs nothing, so no other test would tell.
"""

from __future__ import annotations

import collections

import pytest

from tests.helpers.tiny_models import CONFIGS, make_tiny_model
from tests.pretend_gpu.conftest import HOST_READS
from tests.pretend_gpu.training import step_reads

#: The most waits of one layer (the last), forward and backward, for one micro-batch. Experts without
#: transformer-engine: Megatron's permutation (0.16.1) sizes two tensors by values, and its dispatcher waits for the
#: number of tokens of each expert.
MOST_A_LAYER = {"dense": 0, "experts": 3}
MOST_A_MICRO_BATCH = 0
MOST_A_STEP = 2  # the metrics: sums and maxima
EXPERTS = {"qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight"}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_host_seldom_waits_for_the_device(pretend, tmp_path, family, request):
    def counted(num_layers: int, *micro_batches: int) -> list[collections.Counter]:
        model = make_tiny_model(str(tmp_path / f"{num_layers}"), family, num_layers=num_layers)
        flags = {"batch": {"micro_batch_size": 4}, "optimizer": {"bf16": True}}
        (reads,) = pretend(step_reads, 1, model, flags, [4 * count for count in micro_batches])
        return [collections.Counter(lines) for lines in reads]

    small, fewer = counted(2, 2, 1)
    (deeper,) = counted(3, 2)
    of_layers = deeper - small  # by line, of one layer in two micro-batches
    layer, rest = divmod(of_layers.total(), 2)
    assert rest == 0, "one micro-batch's layer waited more often than the other's"
    beside = [sum(n for line, n in lines.items() if line not in of_layers) for lines in (small, fewer)]
    micro_batch = beside[0] - beside[1]
    step = beside[1] - micro_batch
    request.config.stash[HOST_READS][family] = (layer, micro_batch, step, of_layers)
    assert layer <= MOST_A_LAYER["experts" if family in EXPERTS else "dense"], of_layers
    assert micro_batch <= MOST_A_MICRO_BATCH and step <= MOST_A_STEP, (small, fewer)
