"""Bounds on a weight sync, by hand; the numbers of the usual exercise: 140 GB in 10 s."""

import dataclasses

import pytest

from slime_like.config.transports import SyncShape
from slime_like.planning.placement import make_plan
from slime_like.planning.sync_bound import bounds, render_sync, sync_plan, weight_bytes
from tests.helpers.plan_models import DEEPSEEK_V3, LLAMA_70B, TINY, plan_config

RATES = {"ipc": 1000.0, "nvlink": 100.0, "network": 10.0, "pcie": 20.0, "disk": 5.0}
APART = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 8}


def test_each_transport_by_hand():
    shape = SyncShape(num_bytes=600, rates=RATES, same_node=True, engine_gpus=4)
    near, far = bounds(shape), bounds(dataclasses.replace(shape, same_node=False))
    assert near["broadcast"].bound_s == 6 and far["broadcast"].bound_s == 60
    # Out of one card over its link while it goes into four over theirs: 600 / 20; out of eight cards, 75 bytes each,
    # the way in is longer.
    assert near["ipc"].bound_s == 30 and near["ipc"].available and not far["ipc"].available
    assert bounds(dataclasses.replace(shape, num_sources=8))["ipc"].bound_s == 7.5
    assert near["disk"].bound_s == 120 and far["disk"].bound_s == 240
    # 5% of 300 values, 2 bytes and a position of 4 each; it goes over HTTP.
    assert near["delta"].bytes == 90 and near["delta"].bound_s == far["delta"].bound_s == 9


def test_on_the_device_wherever_every_engine_gpu_is_a_trainers():
    """What a card has not got comes over nvlink, 450 GB/s: three of four or seven of eight parts of 141.1 GB."""

    def chosen(num_gpus: int, rollout_num_gpus: int | None = None, **parallel) -> float:
        placement = {
            "actor_num_gpus_per_node": num_gpus,
            "colocate": True,
            "rollout_num_gpus_per_engine": 4,
            "rollout_num_gpus": rollout_num_gpus,
        }
        config = plan_config(LLAMA_70B, placement=placement, parallel=parallel)
        plan = sync_plan(config, make_plan(config))
        assert plan.transport == "ipc"
        return plan.bound_s

    gigabytes = 141.107
    assert chosen(4, tensor_model_parallel_size=4) == pytest.approx(gigabytes * 3 / 4 / 450, rel=1e-3)
    assert chosen(8, tensor_model_parallel_size=4) == pytest.approx(gigabytes * 3 / 4 / 450, rel=1e-3)
    eight = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    assert chosen(8, **eight) == pytest.approx(gigabytes * 7 / 8 / 450, rel=1e-3)
    # whole on every GPU: packed, and a quarter taken by each of the engine's ranks
    assert chosen(4) == pytest.approx(gigabytes * 5 / 4 / 1675, rel=1e-3)
    # Four of eight engine GPUs have no trainer: everything goes through the host.
    assert chosen(4, 8, tensor_model_parallel_size=4) == pytest.approx(gigabytes / 64, rel=1e-3)


def test_140_gb_in_10_s_are_14_gb_a_second_and_a_port_does_it_in_under_3():
    config = plan_config(LLAMA_70B, placement=APART)
    plan = sync_plan(config, make_plan(config))
    assert plan.transport == "broadcast"
    assert plan.bytes == 2 * 70_553_706_496 and plan.bytes / 10 / 1e9 == pytest.approx(14.1, abs=0.05)
    assert plan.bound_s == pytest.approx(141.107 / 50, rel=1e-3)
    slow = dataclasses.replace(
        config, placement=dataclasses.replace(config.placement, plan_bandwidth=["network=14.11"])
    )
    assert sync_plan(slow, make_plan(slow)).bound_s == pytest.approx(10, rel=1e-3)


def test_on_one_machine_the_network_is_not_crossed():
    config = plan_config(
        LLAMA_70B, placement={"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
    )
    assert sync_plan(config, make_plan(config)).bound_s == pytest.approx(141.107 / 450, rel=1e-3)


def test_routers_biases_travel_in_fp32():
    with_bias = dataclasses.replace(
        DEEPSEEK_V3, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"
    )
    assert weight_bytes(plan_config(with_bias)) - weight_bytes(plan_config(DEEPSEEK_V3)) == 58 * 256 * 4


def test_no_sync_no_plan():
    config = plan_config(TINY, placement={"debug_train_only": True})
    assert sync_plan(config, make_plan(config)) is None
    assert render_sync(None) == ""


def test_the_text_names_the_chosen_and_the_others():
    config = plan_config(LLAMA_70B, placement=APART)
    text = render_sync(sync_plan(config, make_plan(config)))
    assert text.startswith("weight sync by broadcast: 141.11 GB, at least 2.8 s (one source at a time over network)")
    assert "cannot be reached this way" in text and "ipc-handles" in text and "delta" in text
