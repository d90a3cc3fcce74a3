"""Phases, limits and what engines give back, with numbers that can be checked by hand."""

import dataclasses
import functools

import pytest

from slime_like.config.run import RunConfig
from slime_like.planning.hardware import DEFAULT_CARD, GIB
from slime_like.planning.memory.activations import ActivationSizes
from slime_like.planning.memory.by_phase import PHASES, memory_plan
from slime_like.planning.memory.engine_bytes import engine_bytes, engine_elements, mem_fraction
from slime_like.planning.memory.parameters import model_parameters
from slime_like.planning.placement import make_plan
from slime_like.planning.report.render import as_json, make_report
from tests.helpers.operations import count_operations
from tests.helpers.plan_models import DEEPSEEK_V3, LLAMA_70B, QWEN3_8B, TINY, plan_config

COLOCATED = {"colocate": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 2}


def phases_of(config, bundle=0):
    """{phase: {part: bytes}} of one GPU."""
    plan = memory_plan(config, make_plan(config))
    return {phase.name: phase.bytes for phase in plan.per_gpu[bundle].phases}


def test_trainer_and_engines_take_turns():
    phases = phases_of(plan_config(TINY, placement=COLOCATED))
    assert tuple(phases) == PHASES
    for name in ("start", "generate"):
        assert not {"weights", "gradients", "optimizer"} & set(phases[name])
    for name in ("score", "train"):
        assert {"weights", "gradients", "optimizer"} <= set(phases[name])
    assert "weights" in phases["sync"] and not {"gradients", "optimizer"} & set(phases["sync"])
    assert "kv_cache" in phases["generate"] and "engine weights" in phases["generate"]
    assert not {"kv_cache", "engine weights"} & set(phases["train"])
    assert "engine weights" in phases["sync"] and "kv_cache" not in phases["sync"]


def test_without_offload_train_the_trainer_stays():
    phases = phases_of(plan_config(TINY, placement=COLOCATED | {"offload_train": False}))
    for name in ("generate", "score", "train", "sync"):
        assert {"weights", "gradients", "optimizer"} <= set(phases[name])
    assert "kv_cache" in phases["generate"] and "engine weights" in phases["generate"]
    assert not {"kv_cache", "engine weights"} & set(phases["train"])
    assert "engine weights" in phases["sync"] and "kv_cache" not in phases["sync"]
    assert phases["start"]["optimizer"] < phases["train"]["optimizer"]  # the moments come with the first step


def test_what_leaves_the_card_lies_in_the_hosts_memory():
    """Weights 2 bytes with their padding to 256, the moments and main weights 12, of which each of two ranks has half;
    gradients are zeros.
    """
    for given, each in ((None, True), (False, False)):
        config = plan_config(TINY, placement=COLOCATED | {"offload_train": given})
        gpus = memory_plan(config, make_plan(config)).per_gpu
        train = gpus[0].phases[3].bytes
        assert train["weights"] % 256 == 0 and train["weights"] >= 2 * 1720
        assert sum(gpu.phases[3].bytes["optimizer"] for gpu in gpus) == 12 * 1720
        assert [gpu.host_bytes for gpu in gpus] == [
            each * (gpu.phases[3].bytes["weights"] + gpu.phases[3].bytes["optimizer"]) for gpu in gpus
        ]


def test_a_colocated_critic_and_a_reference_leave_too():
    placement = COLOCATED | {"colocate_training": True, "colocate_policy_ref": False}
    config = plan_config(TINY, loss={"advantage_estimator": "ppo", "kl_coef": 0.1}, placement=placement)
    phases = phases_of(config)
    assert {"critic weights", "critic gradients", "critic optimizer"} <= set(phases["train"])
    assert set(phases["generate"]) == {"communication", "engine weights", "kv_cache", "engine work", "engine graphs"}
    assert set(phases["sync"]) == {"communication", "weights", "engine weights", "sync buffers", "engine graphs"}


def card_80(num_gpus: int, **placement) -> RunConfig:
    """Qwen3-8B, 8,190,735,360 parameters, on so many cards of 80 GiB, engines of one GPU among the trainer's."""
    placement = {"colocate": True, "actor_num_gpus_per_node": num_gpus, "gpu_memory_gib": 80.0} | placement
    batch = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096}
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return plan_config(
        QWEN3_8B, placement=placement, batch=batch, parallel=recompute, rollout={"rollout_max_response_len": 4096}
    )


def test_8b_on_one_card_does_not_fit_and_says_why():
    """18 bytes a parameter x 8.19e9 = 137.3 GiB are needed at once in a train step, wherever engines are then."""
    (problem,) = make_report(card_80(1)).problems
    assert "GPU 0 needs 137.3 GiB for weights, gradients and optimizer alone in phase score, but has 80.0" in problem
    assert 18 * 8_190_735_360 / GIB == pytest.approx(137.3, abs=0.05)


def test_8b_on_eight_cards_fits_with_a_cache_of_54_gib_where_without_offload_it_has_3():
    """By hand, in GiB: trainer 2 + 4 + 12/8 = 7.5 bytes x 8.19e9 = 57.2; engine weights 2 bytes = 15.26; engine work
    8192 x 2 x (3 x 4096 + 4 x 12288) bytes = 0.94; 1 for each process and 1.4 for the engine's graphs.

    With offload 79 are free when engines start, of which SGLang keeps 10: 69 - 15.26 = 53.7 of cache. Without, 6.5
    bytes (moments come later) and a process leave 29.4 at the start, and 80 - 57.2 - 1 - 2.4 - 0.94 = 18.5 while
    generating: 0.627 of it, 18.4 - 15.26 = 3.2 of cache.
    """
    plans = {given: memory_plan(card_80(8, offload_train=given), make_plan(card_80(8))) for given in (None, False)}
    generate = {given: plan.per_gpu[0].phases[1].bytes for given, plan in plans.items()}
    train = plans[None].per_gpu[0].phases[3].bytes
    assert sum(train[part] for part in ("weights", "gradients", "optimizer")) / GIB == pytest.approx(57.2, abs=0.05)
    assert plans[None].fits and plans[None].mem_fraction_static == 0.873  # 69 / 79
    assert generate[None]["engine weights"] / GIB == pytest.approx(15.26, abs=0.01)
    assert generate[None]["kv_cache"] / GIB == pytest.approx(53.7, abs=0.1)
    assert plans[None].per_gpu[0].host_bytes / GIB == pytest.approx((2 + 12 / 8) * 8.1907 / GIB * 1e9, rel=1e-3)
    assert plans[False].mem_fraction_static == 0.627 and plans[False].per_gpu[0].host_bytes == 0
    assert generate[False]["kv_cache"] / GIB == pytest.approx(3.2, abs=0.1)
    static = generate[False]["kv_cache"] + generate[False]["engine weights"]
    assert static + generate[False]["engine work"] + train["weights"] < 80 * GIB


def test_a_share_that_was_given_is_taken_and_none_is_derived_for_engines_apart():
    given = plan_config(TINY, placement=COLOCATED, sglang={"mem_fraction_static": "0.5"})
    assert memory_plan(given, make_plan(given)).mem_fraction_static is None
    apart = plan_config(TINY, placement={"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2})
    assert memory_plan(apart, make_plan(apart)).mem_fraction_static is None
    derived = plan_config(TINY, placement=COLOCATED)
    report = make_report(derived)
    assert report.to_dict()["memory"]["mem_fraction_static"] == report.memory.mem_fraction_static > 0.8
    assert f"engines start with --sglang-mem-fraction-static {report.memory.mem_fraction_static:g}" in report.text()


def test_without_offload_rollout_engines_stay():
    phases = phases_of(plan_config(TINY, placement=COLOCATED | {"offload_rollout": False}))
    assert {"kv_cache", "engine weights"} <= set(phases["train"])


def test_engines_apart_leave_the_trainer_alone():
    config = plan_config(TINY, placement={"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2})
    assert "kv_cache" not in phases_of(config, 0)["generate"]
    assert set(phases_of(config, 2)["train"]) == {"engine weights", "kv_cache", "communication", "engine graphs"}


def test_debug_modes_have_only_their_phases():
    assert tuple(phases_of(plan_config(TINY, placement={"debug_train_only": True}))) == ("start", "score", "train")
    assert tuple(phases_of(plan_config(TINY, placement={"debug_rollout_only": True, "rollout_num_gpus": 1}))) == (
        "start",
        "generate",
    )


def test_the_card():
    config = plan_config(TINY, placement=COLOCATED)
    assert memory_plan(config, make_plan(config)).limit_bytes == DEFAULT_CARD.memory_bytes
    config = plan_config(TINY, placement=COLOCATED | {"gpu_memory_gib": 141.0})
    assert memory_plan(config, make_plan(config)).to_dict()["limit_bytes"] == 151397597184


def test_kv_cache_is_what_the_static_share_leaves():
    config = plan_config(
        LLAMA_70B,
        placement={"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8},
        sglang={"mem_fraction_static": "0.5"},
    )
    card = 80 * GIB
    engine = engine_bytes(config, card)
    assert engine.weights + engine.kv_cache == card // 2
    assert engine.weights == pytest.approx(2 * model_parameters(LLAMA_70B) / 8, rel=1e-3)
    assert mem_fraction(plan_config(TINY), card) == 0.875


def test_few_key_value_heads_are_repeated_on_many_ranks():
    eight, sixteen = (engine_elements(LLAMA_70B, tp=tp, attention_tp=tp, pp=1) for tp in (8, 16))
    keys = 80 * 2 * 8 * 128 * 8192
    assert sixteen == pytest.approx((model_parameters(LLAMA_70B) - keys) / 16 + keys / 8, rel=1e-3)
    assert eight == pytest.approx(model_parameters(LLAMA_70B) / 8, rel=1e-3)


def test_an_engine_that_cannot_hold_its_weights_does_not_fit():
    config = plan_config(
        LLAMA_70B, placement={"debug_rollout_only": True, "rollout_num_gpus": 1}, sglang={"mem_fraction_static": "0.9"}
    )
    plan = memory_plan(config, make_plan(config))
    assert not plan.fits and "--rollout-num-gpus-per-engine" in plan.advice[0]


def test_70b_on_8_gpus_does_not_fit_and_the_advice_names_flags():
    split = {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    config = plan_config(
        LLAMA_70B,
        parallel=split,
        placement={"colocate": True, "rollout_num_gpus_per_engine": 8, "gpu_memory_gib": 80.0},
    )
    plan = memory_plan(config, make_plan(config))
    # 18 bytes a parameter, 8 ways.
    trainer = sum(plan.per_gpu[0].phases[3].bytes[name] for name in ("weights", "gradients", "optimizer"))
    assert trainer / GIB == pytest.approx(18 * 70.5537e9 / 8 / GIB, rel=1e-3) == pytest.approx(147.8, abs=0.1)
    assert not plan.fits and any("--optimizer-cpu-offload" in advice for advice in plan.advice)


def test_offloaded_optimizer_lies_in_host_memory():
    config = plan_config(TINY, optimizer={"optimizer_cpu_offload": True}, placement=COLOCATED)
    gpus = memory_plan(config, make_plan(config)).per_gpu
    assert "optimizer" not in gpus[0].phases[3].bytes
    offloaded = sum(gpu.phases[3].bytes["weights"] for gpu in gpus)
    assert sum(gpu.host_bytes for gpu in gpus) - offloaded == 12 * model_parameters(TINY)


def test_a_swapped_reference_costs_host_memory_and_one_apart_a_gpu():
    swapped = plan_config(TINY, loss={"use_kl_loss": True}, placement=COLOCATED | {"offload_train": False})
    assert memory_plan(swapped, make_plan(swapped)).per_gpu[0].host_bytes == 2 * 2 * model_parameters(TINY)
    placement = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "colocate_policy_ref": False}
    apart = plan_config(TINY, loss={"use_kl_loss": True}, placement=placement)
    assert "ref weights" in phases_of(apart, 2)["score"] and "ref activations" in phases_of(apart, 2)["score"]


def test_a_critic_trains_on_its_gpus():
    config = plan_config(
        TINY, loss={"advantage_estimator": "ppo"}, placement={"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    )
    phases = phases_of(config, 2)
    assert {"critic weights", "critic gradients", "critic optimizer", "critic activations"} <= set(phases["train"])
    assert "critic logits" not in phases["train"]


def test_recompute_keeps_only_the_boundaries():
    sizes = {name: ActivationSizes(model=LLAMA_70B,
        parallel=dataclasses.replace(plan_config(LLAMA_70B).parallel, **flags), width=2) for name, flags in {
        "all": {}, "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }.items()}  # fmt: skip
    every, once = sizes["full"].kept_bytes(0)
    assert every == pytest.approx(80 * 2 * 8192, rel=0.05)  # one hidden state a layer, and the last norm
    assert once > sizes["all"].kept_bytes(0)[1]
    assert sizes["all"].kept_bytes(0)[0] > 20 * every


def test_early_stages_hold_several_micro_batches():
    split = {"pipeline_model_parallel_size": 4}
    placement = {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 1}
    config = plan_config(dataclasses.replace(TINY, num_layers=4), parallel=split, placement=placement)
    activations = [phases_of(config, bundle)["train"]["activations"] for bundle in range(4)]
    assert activations[0] > activations[1] > activations[2]


@pytest.mark.slow
def test_the_work_of_a_671b_report_grows_with_the_gpus_and_no_faster():
    """10240 GPUs take under a second: counted for fewer, since a loaded host is slower."""
    split = {
        "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 16,
        "decoder_last_pipeline_num_layers": 1,
        "expert_model_parallel_size": 32, "expert_tensor_parallel_size": 1,
    }  # fmt: skip

    def report(nodes: int) -> None:
        placement = {
            "colocate": True,
            "actor_num_nodes": nodes,
            "rollout_num_gpus_per_engine": 64,
            "gpu_memory_gib": 141.0,
        }
        config = plan_config(
            DEEPSEEK_V3, parallel=split, placement=placement, rollout={"rollout_batch_size": nodes * 8}
        )
        assert len(as_json(make_report(config))) > 1000 * nodes

    report(64)  # fills what is kept between reports
    operations = [count_operations(functools.partial(report, nodes)) for nodes in (64, 128, 256)]
    of_a_node = [(operations[1] - operations[0]) / 64, (operations[2] - operations[1]) / 128]
    assert of_a_node[1] < 1.1 * of_a_node[0]
    # 23,400 a node are 30 million for 10240 GPUs, which took 0.7 s; a fifth more would be 0.85 s
    assert 1280 * of_a_node[1] < 36_000_000


def test_logits_are_cut_into_chunks():
    config = plan_config(TINY)
    sizes = ActivationSizes(model=TINY, parallel=config.parallel, width=2)
    # 11 columns: logits of 100 tokens in bf16, whose place the gradient takes, two fp32 tensors of all or of 10 of
    # them.
    assert sizes.logits(100, chunk_tokens=None) == 11 * (100 * 2 + 100 * 8)
    assert sizes.logits(100, chunk_tokens=10) == 11 * (100 * 2 + 10 * 8)
