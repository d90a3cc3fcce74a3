"""Every model family trains on the pretended device as on the CPU, on one rank.

Covers slime_like.megatron_backend.worker where torch.cuda.is_available().
"""

from __future__ import annotations

import collections

import pytest

from tests.helpers.tiny_models import CONFIGS, make_tiny_model
from tests.helpers.train_world import run_ranks
from tests.pretend_gpu.training import train_steps


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_family_trains_on_the_device_as_on_the_host(pretend, tmp_path, family):
    folder = make_tiny_model(str(tmp_path / family), family, num_layers=2)
    (device,) = pretend(train_steps, 1, folder, 2, {})
    (host,) = run_ranks(train_steps, 1, folder, 2, {})
    assert device["device"] == "cuda:0" and host["device"] == "cpu"
    for ours, theirs in zip(device["metrics"], host["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-8)
    for name in ("train/loss", "train/grad_norm"):
        assert device["metrics"][0][name] == pytest.approx(host["metrics"][0][name], rel=1e-6)
    assert device["reads"], "no host read was counted"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_half_precision_trains_with_the_kernel_of_packed_sequences(pretend, tmp_path, family):
    folder = make_tiny_model(str(tmp_path / family), family, num_layers=2)
    half = {"optimizer": {"bf16": True}}
    (device,) = pretend(train_steps, 1, folder, 1, half)
    (host,) = run_ranks(train_steps, 1, folder, 1, half)
    kernels = collections.Counter(d["operation"] for kind, d in device["events"] if kind == "kernel")
    # 8 micro-batches of 2 layers.
    assert kernels == {"torch_attn::_varlen_attn": 16, "torch_attn::_varlen_attn_backward": 16}
    assert not host["events"]
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/logprob_abs_diff"):
        # 8 bits of mantissa, in another order of operations.
        assert device["metrics"][0][name] == pytest.approx(host["metrics"][0][name], rel=0.02), name
