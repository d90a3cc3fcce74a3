"""Two ranks on the pretended device train as on the CPU, and tell each other what the other expects.

Covers slime_like.megatron_backend.worker where torch.cuda.is_available(), with NCCL's calls noted.
"""

from __future__ import annotations

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import run_ranks
from tests.pretend_gpu.collectives import differences
from tests.pretend_gpu.training import train_steps

LAYOUTS = {
    "tp2 with sequence parallel": ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp2": ("qwen3", {}),
    "dp2, reduced early": ("qwen3", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "cp2": ("qwen3", {"context_parallel_size": 2}),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_on_the_device_as_on_the_host(pretend, tmp_path, name):
    family, parallel = LAYOUTS[name]
    folder = make_tiny_model(str(tmp_path / "model"), family, num_layers=2)
    device = pretend(train_steps, 2, folder, 1, {"parallel": parallel})
    host = run_ranks(train_steps, 2, folder, 1, {"parallel": parallel})
    for ours, theirs in zip(device, host, strict=True):
        assert ours["device"] == "cuda:0"
        assert ours["metrics"][0] == pytest.approx(theirs["metrics"][0], rel=1e-6, abs=1e-9)
    calls = {rank: [d for kind, d in answer["events"] if kind == "collective"] for rank, answer in enumerate(device)}
    assert all(calls.values())
    assert differences(calls) == []
    for of_rank in calls.values():
        # A communicator whose calls come from two streams may run them in another order than its peers'.
        streams = {(call["group"], call["stream"]) for call in of_rank}
        assert len(streams) == len({group for group, _ in streams}), streams
