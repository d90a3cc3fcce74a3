"""What is told aloud: flags without effect, and kernels that a CPU host does not have."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.engine import EngineConfig
from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.slime_flags.notices import notices


def plain(**groups) -> RunConfig:
    """Groups of two: a group of one is a notice of its own."""
    return RunConfig(**{"rollout": RolloutConfig(n_samples_per_prompt=2), **groups})


def test_a_plain_run_needs_no_notice():
    assert notices(plain()) == []


def test_a_kl_loss_without_weight_is_only_measured():
    loss = dataclasses.replace(plain().loss, use_kl_loss=True)
    notice = "--kl-loss-coef is 0: the KL to the reference is measured, not trained on"
    assert notice in notices(plain(loss=dataclasses.replace(loss, kl_loss_coef=0.0)))
    assert notice not in notices(plain(loss=dataclasses.replace(loss, kl_loss_coef=0.1)))


def test_external_engines_keep_their_memory():
    placement = PlacementConfig(rollout_external=True, rollout_external_engine_addrs=["a:1"], offload_rollout=True)
    (notice,) = notices(plain(placement=placement))
    assert notice.startswith("--offload-rollout is off")


@pytest.mark.parametrize(
    ("model", "sglang", "named"),
    [
        ({"attention_backend": "flash"}, {}, ["--attention-backend flash"]),
        ({"attention_backend": "local"}, {}, []),
        ({"moe_grouped_gemm": True, "moe_permute_fusion": True}, {}, ["--moe-grouped-gemm, --moe-permute-fusion"]),
        ({}, {"attention_backend": "fa3"}, ["--sglang-attention-backend fa3"]),
        ({}, {"attention_backend": "triton", "kv_cache_dtype": "auto"}, []),
        (
            {},
            {"kv_cache_dtype": "fp8_e5m2", "cuda_graph_bs_decode": ["1", "2"]},
            ["--sglang-kv-cache-dtype fp8_e5m2, --sglang-cuda-graph-bs-decode 1 2"],
        ),
    ],
)
def test_kernels_of_gpu_hosts_are_named(model: dict, sglang: dict, named: list[str]):
    texts = notices(plain(model=ModelConfig(**model), engine=EngineConfig(sglang=sglang)))
    assert [notice.split(": for GPU hosts")[0] for notice in texts] == named


def test_engines_that_are_not_started_need_no_notice():
    config = plain(
        engine=EngineConfig(sglang={"attention_backend": "fa3"}), placement=PlacementConfig(debug_train_only=True)
    )
    assert notices(config) == []
