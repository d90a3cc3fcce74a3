"""What follows from several groups of flags together: sizes, roles, and what does not go together."""
# Covers slime_like.config.rules and slime_like.config.tree too, which it does not import itself.

from __future__ import annotations

import dataclasses
import json

import pytest

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig

RUN = RunConfig(
    placement=PlacementConfig(actor_num_gpus_per_node=4, rollout_num_gpus=4),
    data=DataConfig(num_rollout=1),
    rollout=RolloutConfig(rollout_batch_size=8, n_samples_per_prompt=4),
    reward=RewardConfig(rm_type="math"),
)


def with_parts(config: RunConfig = RUN, **groups: dict) -> RunConfig:
    """The config with these fields of these groups changed."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in groups.items()}
    )


@pytest.mark.parametrize(
    ("batch", "steps", "size"),
    [
        ({}, 1, 32),
        ({"global_batch_size": 16}, 2, 16),
        ({"num_steps_per_rollout": 4}, 4, 8),
        ({"global_batch_size": 64}, 1, 64),
    ],
)
def test_steps_and_their_sizes(batch: dict, steps: int, size: int):
    config = with_parts(batch=batch)
    assert (config.samples_per_rollout, config.num_steps_per_rollout, config.global_batch_size) == (32, steps, size)


def test_copies_of_the_model():
    assert RUN.data_parallel_size == 4
    assert with_parts(parallel={"tensor_model_parallel_size": 2}).data_parallel_size == 2


def test_roles_follow_from_the_loss():
    assert not (RUN.needs_reference or RUN.needs_critic or RUN.needs_reward_model)
    assert with_parts(loss={"use_kl_loss": True}).needs_reference and with_parts(loss={"kl_coef": 0.1}).needs_reference
    assert with_parts(loss={"advantage_estimator": "ppo"}).needs_critic
    assert with_parts(checkpoint={"reward_load": "r"}).needs_reward_model
    supervised = with_parts(loss={"loss_type": "sft_loss", "use_kl_loss": True}, checkpoint={"reward_load": "r"})
    assert supervised.is_sft and not (
        supervised.uses_engines or supervised.needs_reference or supervised.needs_reward_model
    )


@pytest.mark.parametrize(
    ("placement", "offloads"),
    [
        ({}, False),
        ({"colocate": True}, True),
        ({"colocate": True, "offload_rollout": False}, False),
        ({"offload_rollout": True}, True),
        ({"offload_rollout": True, "rollout_external": True}, False),
        ({"colocate": True, "debug_train_only": True}, False),
        ({"colocate": True, "offload": False}, False),
        ({"colocate": True, "offload": False, "offload_rollout": True}, True),
    ],
)
def test_whether_engines_give_their_memory_back(placement: dict, offloads: bool):
    assert with_parts(placement=placement).offload_rollout is offloads


@pytest.mark.parametrize(
    ("placement", "on_gpu", "on_host"),
    [
        ({}, False, False),
        ({"colocate": True}, True, False),
        ({"colocate": True, "offload_train": True}, True, True),
        ({"colocate": True, "offload": True}, True, True),
        ({"colocate": True, "offload_train": False, "offload": True}, False, False),
        ({"colocate": True, "offload": False}, False, False),
        ({"colocate": True, "debug_train_only": True, "offload_train": True}, False, False),
    ],
)
def test_whether_the_trainer_leaves_its_card_while_engines_generate(placement: dict, on_gpu: bool, on_host: bool):
    config = with_parts(placement=placement)
    assert config.offloads_train(on_gpu=True) is on_gpu and config.offloads_train(on_gpu=False) is on_host


def test_who_shares_a_gpu_starts_one_after_the_other():
    colocated, apart = with_parts(placement={"colocate": True}), with_parts(placement={"offload_train": True})
    assert colocated.starts_in_turn(on_gpu=True) and not colocated.starts_in_turn(on_gpu=False)
    assert with_parts(placement={"colocate": True, "offload_train": True}).starts_in_turn(on_gpu=False)
    assert with_parts(placement={"colocate": True, "offload_train": False}).starts_in_turn(on_gpu=True)
    assert not apart.starts_in_turn(on_gpu=True)


def test_a_possible_run_has_no_problems():
    assert RUN.problems() == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"batch": {"global_batch_size": 24}}, "1 steps of 24 samples are not the rollout's 32"),
        (
            {"parallel": {"tensor_model_parallel_size": 3}},
            "the trainer's 4 GPUs do not divide by tensor x pipeline x context parallel size 3",
        ),
        (
            {"rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": 6}},
            "--global-batch-size 6 does not divide by the data parallel size 4",
        ),
        ({"batch": {"micro_batch_size": 3}}, "8 samples per data parallel rank do not divide by --micro-batch-size 3"),
        ({"loss": {"use_kl_loss": True}}, "--use-kl-loss needs --ref-load"),
        ({"reward": {"rm_type": None}}, "samples need a reward"),
        ({"placement": {"debug_train_only": True}}, "--debug-train-only needs --load-debug-rollout-data"),
        ({"checkpoint": {"critic_load": "c"}}, "--critic-load does nothing without --advantage-estimator ppo"),
        ({"sync": {"update_weight_transport": "ipc"}}, "--update-weight-transport ipc needs --colocate"),
        (
            {"sync": {"update_weight_transport": "broadcast"}, "placement": {"colocate": True}},
            "broadcast does not go with --colocate",
        ),
        ({"sync": {"update_weight_mode": "delta"}, "placement": {"colocate": True}}, "does not go with --colocate"),
        (
            {"engine": {"sglang": {"dp_size": "2"}}, "placement": {"rollout_num_gpus_per_engine": 2}},
            "--sglang-dp-size 2 needs --sglang-enable-dp-attention",
        ),
        ({"engine": {"sglang": {"pp_size": "2"}}}, "an engine of 1 GPUs does not divide into 2 pipeline stages"),
    ],
)
def test_what_does_not_go_together_is_told(groups: dict, message: str):
    problems = with_parts(**groups).problems()
    assert any(message in problem for problem in problems), problems


def test_the_config_can_be_written_down():
    written = json.loads(RUN.to_json())
    assert written["rollout"]["rollout_batch_size"] == 8 and written["role"] == "actor"
    groups = (ModelConfig, ParallelConfig, CheckpointConfig, BatchConfig, LossConfig, EngineConfig, SyncConfig)
    assert all(any(isinstance(getattr(RUN, field.name), kind) for field in dataclasses.fields(RUN)) for kind in groups)


def test_plugins_read_a_flat_view():
    assert RUN.plugin_args().rollout_batch_size == 8
