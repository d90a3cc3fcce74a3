"""Engine sizes from SGLang's flags, bandwidths of the plan, counts of the roles."""

from __future__ import annotations

import pytest

from slime_like.config.engine import EngineConfig
from slime_like.config.loss import LossConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig


def run_config(gpus_per_engine: int, **sglang) -> RunConfig:
    return RunConfig(
        placement=PlacementConfig(rollout_num_gpus_per_engine=gpus_per_engine), engine=EngineConfig(sglang=sglang)
    )


def test_engine_sizes_without_flags():
    config = run_config(4)
    assert (config.engine_tp_size, config.engine_pp_size, config.engine_dp_size, config.engine_ep_size) == (4, 1, 1, 1)


@pytest.mark.parametrize("name", ["pp_size", "pp", "pipeline_parallel_size"])
def test_pipeline_stages_leave_the_rest_to_tensor_parallelism(name: str):
    config = run_config(8, **{name: "2"})
    assert (config.engine_tp_size, config.engine_pp_size) == (4, 2)


def test_data_and_expert_parallel_gpus_lie_within_the_tensor_parallel_ones():
    config = run_config(16, dp_size="8", ep_size="16", enable_dp_attention=True)
    assert (config.engine_tp_size, config.engine_dp_size, config.engine_ep_size) == (16, 8, 16)
    assert config.engine.dp_attention


@pytest.mark.parametrize("value", ["0", "-1", "two", True, ["1", "2"]])
def test_sizes_that_are_no_counts(value):
    (problem,) = EngineConfig(sglang={"ep_size": value}).problems()
    assert problem.startswith("--sglang-ep-size") and "whole number" in problem


def test_bandwidths():
    assert PlacementConfig(plan_bandwidth=["nvlink=450", "disk=2.5"]).bandwidths() == {"nvlink": 450.0, "disk": 2.5}
    assert PlacementConfig().bandwidths() == {}


@pytest.mark.parametrize("pair", ["nvlink", "ether=3", "disk=fast", "disk=0", "disk=inf", "disk=nan"])
def test_bandwidths_that_make_no_sense(pair: str):
    (problem,) = PlacementConfig(plan_bandwidth=[pair]).problems()
    assert problem.startswith("--plan-bandwidth ") and pair in problem


@pytest.mark.parametrize("name", ["critic_num_nodes", "ref_num_gpus_per_node", "reward_num_nodes", "num_gpus_per_node"])
def test_counts_are_at_least_one(name: str):
    (problem,) = PlacementConfig(**{name: 0}).problems()
    assert problem == f"--{name.replace('_', '-')} 0: must be at least 1."


def test_card_needs_memory():
    assert PlacementConfig(gpu_memory_gib=80).problems() == []
    assert "must be above 0" in PlacementConfig(gpu_memory_gib=0).problems()[0]


def test_sync_flags_that_belong_to_another_transport():
    def problems(**options) -> str:
        return "\n".join(SyncConfig(**options).problems())

    assert "--update-weight-disk-keep-files needs --update-weight-transport disk" in problems(
        update_weight_disk_keep_files=True
    )
    assert "--update-weight-interface does nothing with --update-weight-transport disk" in problems(
        update_weight_interface="eth0", update_weight_transport="disk"
    )
    for good in (
        {"update_weight_interface": "eth0"},
        {"update_weight_disk_keep_files": True, "update_weight_transport": "disk"},
    ):
        assert problems(**good) == ""


@pytest.mark.parametrize(
    "idle",
    [
        {"placement": PlacementConfig(debug_rollout_only=True)},
        {"placement": PlacementConfig(debug_train_only=True)},
        {"loss": LossConfig(loss_type="sft_loss")},
    ],
)
def test_a_transform_needs_weights_to_be_sent(idle: dict):
    def problems(**groups) -> list[str]:
        sync = SyncConfig(custom_weight_transform_path="any.function")
        return [
            problem
            for problem in RunConfig(sync=sync, **groups).problems()
            if problem.startswith("--custom-weight-transform-path")
        ]

    assert problems() == []
    assert problems(**idle) == ["--custom-weight-transform-path: this run sends no weights. Fix: leave it out."]


@pytest.mark.parametrize("name", ["offload_train", "offload", "offload_rollout"])
def test_who_shares_no_gpu_makes_no_room(name):
    (problem,) = PlacementConfig(**{name: True}).problems()
    assert problem.startswith(f"--{name.replace('_', '-')} needs --colocate")
    assert PlacementConfig(colocate=True, **{name: True}).problems() == []
