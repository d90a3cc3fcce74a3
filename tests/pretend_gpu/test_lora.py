"""Adapters on transformer-engine's layers, which are pretended, against PEFT on the HF model: with the norm fused into
the layer, with experts in one layer, and on tensor and expert parallel ranks.

Covers slime_like.megatron_backend.lora.build and slime_like.megatron_backend.lora.layers where there is one.
"""

from __future__ import annotations

import pytest

from tests.helpers.lora_rows import (
    ADAPTERS,
    Truths,
    adapter_folders,
    check_gradients,
    check_log_probs,
    check_merged,
    check_saved,
    check_steps,
    one_row,
    worker_of,
)
from tests.helpers.train_world import make_samples
from tests.pretend_gpu.test_transformer_engine import GROUPED

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
#: name -> (set of adapters, ranks, --… of the parallel group, whether experts are one layer)
ROWS = {
    "dense": ("qwen3", 1, {}, False),
    "dense, tp2": ("qwen3", 2, TENSOR, False),
    "dense, tp2 with sequence parallelism": ("qwen3", 2, SEQUENCE, False),
    "some modules, tp2 with sequence parallelism": ("some modules", 2, SEQUENCE, False),
    "joined gate and up, tp2": ("glm4", 2, TENSOR, False),
    "latent attention, tp2 with sequence parallelism": ("deepseek_v3", 2, SEQUENCE, False),
    "output layer, pp2": ("output", 2, {"pipeline_model_parallel_size": 2}, False),
    "recomputed": (
        "qwen3",
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        False,
    ),
    "experts one by one, ep2": ("experts", 2, EXPERTS, False),
    "experts": ("experts", 1, {}, True),
    "experts, dp2, reduced early": ("experts", 2, {"overlap_grad_reduce": True}, True),
    "experts, ep2": ("experts", 2, EXPERTS, True),
    "experts, tp2 with sequence parallelism": ("experts", 2, SEQUENCE, True),
    "experts, ep2 and tp2": ("experts", 2, SEQUENCE | EXPERTS | {"expert_tensor_parallel_size": 1}, True),
}
#: In every run; the others with scripts/test_long.sh.
QUICK = ("dense, tp2 with sequence parallelism", "experts, tp2 with sequence parallelism")
MARKED = [row if row in QUICK else pytest.param(row, marks=pytest.mark.long_run) for row in ROWS]


def in_rank(place: dict, row: str, folders: dict, save: str) -> dict:
    """What a rank says of the row, and the kinds of its layers."""
    name, ranks, parallel, grouped = ROWS[row]
    model = GROUPED if grouped else {}
    worker, _ = worker_of(place, place["master_port"], ranks, folders, name, parallel, **model)
    answer = one_row(worker, make_samples(8), save)
    answer["kinds"] = {type(module).__name__ for chunk in worker.stage for module in chunk.modules()}
    answer["device"] = str(next(worker.stage.parameters()).device)
    del answer["config"]
    worker.close()
    return answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return adapter_folders(tmp_path_factory.mktemp("models"), ADAPTERS)


@pytest.fixture(scope="module")
def truths(folders):
    return Truths(folders)


@pytest.mark.parametrize("row", MARKED)
def test_adapters_on_its_layers_are_pefts(pretend_te, folders, truths, tmp_path, row):
    name, num_ranks, _, grouped = ROWS[row]
    truth, base = truths[name], folders[ADAPTERS[name][0]]
    ranks = pretend_te(in_rank, num_ranks, row, folders, str(tmp_path / "save"))
    for of_rank in ranks:
        assert of_rank["device"] == "cuda:0"
        assert {"TERowParallelLinear", "TELayerNormColumnParallelLinear"} <= of_rank["kinds"]
        assert ("TEColumnParallelGroupedLinear" in of_rank["kinds"]) == grouped
        assert "RowParallelLinear" not in of_rank["kinds"]
    check_log_probs(ranks, truth)
    check_gradients(ranks, truth)
    check_steps(ranks, truth)
    check_merged(ranks, truth, base)
    check_saved(ranks[0], base, str(tmp_path / "save"))
