"""What tells ranks of a role apart, and what each phase adds."""

from __future__ import annotations

from slime_like.config.lora import LoraConfig
from slime_like.planning.memory.adapters import TenantRoom
from slime_like.planning.memory.role_bytes import RoleBytes, held_elements
from slime_like.planning.memory.trainer_bytes import Precision
from slime_like.planning.placement import make_plan
from tests.helpers.plan_models import TINY, plan_config

PLACEMENT = {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 1}


def role(name: str, *, placement: dict = PLACEMENT, **groups) -> RoleBytes:
    config = plan_config(TINY, placement=placement, **groups)
    return RoleBytes(config, make_plan(config), name)


def test_who_sends_weights():
    """Tensor parallel 2 of 4 GPUs: rank 0 sends, rank 1 helps to gather, the second copy waits."""
    actor = role("actor", parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    assert [actor.key(rank).source for rank in range(4)] == [2, 1, 0, 0]


def test_each_stage_has_a_sender():
    actor = role("actor", parallel={"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1})
    assert [(actor.key(rank).stage, actor.key(rank).source) for rank in range(4)] == [(0, 2), (0, 0), (1, 2), (1, 0)]


def test_on_shared_cards_every_rank_sends():
    """Two buckets each, and of pipeline stages what goes from one to another: half a bucket, or the largest tensor."""
    together = {"actor_num_gpus_per_node": 4, "colocate": True}
    sync = {"update_weight_buffer_size": 1000}
    actor = role("actor", placement=together, sync=sync, parallel={"tensor_model_parallel_size": 2})
    assert [actor.key(rank).source for rank in range(4)] == [2, 2, 2, 2]
    assert actor.phases(actor.key(3))["sync"]["sync buffers"] == 2 * 1000
    staged = {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}
    actor = role("actor", placement=together, sync=sync, parallel=staged)
    assert [actor.phases(actor.key(rank))["sync"]["sync buffers"] for rank in (0, 3)] == [2 * 1000 + 500] * 2
    # no rank is on the cards of half of the engines: the first rank alone sends
    apart = role("actor", placement=together | {"rollout_num_gpus": 8})
    assert [apart.key(rank).source for rank in range(4)] == [2, 0, 0, 0]


def test_the_optimizers_moments_come_with_the_first_step():
    actor = role("actor", parallel={"use_distributed_optimizer": False})
    phases = actor.phases(actor.key(0))
    assert phases["start"]["optimizer"] == 4 * 1720 and phases["train"]["optimizer"] == 12 * 1720
    assert held_elements(actor.key(0).held, Precision(weight=2, gradient=4, state=12)) == 1720


def test_only_training_keeps_activations():
    actor = role("actor")
    phases = actor.phases(actor.key(0))
    assert phases["train"].keys() - phases["generate"].keys() == {"activations", "logits"}
    assert phases["sync"].keys() - phases["generate"].keys() == {"sync buffers"}


def test_a_reference_apart_holds_weights_only():
    apart = role(
        "ref",
        placement=PLACEMENT | {"colocate_policy_ref": False, "ref_num_gpus_per_node": 4},
        loss={"use_kl_loss": True},
        checkpoint={"ref_load": "r"},
    )
    phases = apart.phases(apart.key(0))
    assert phases["train"].keys() == {"ref weights", "communication"} and phases["train"]["ref weights"] >= 2 * 1720
    assert phases["score"].keys() - phases["train"].keys() == {"ref activations", "ref logits"}


def test_a_swapped_reference_lies_in_the_hosts_memory():
    swapped = role(
        "ref",
        placement=PLACEMENT | {"colocate_policy_ref": True},
        loss={"use_kl_loss": True},
        checkpoint={"ref_load": "r"},
    )
    key = swapped.key(0)
    # itself, and the actor's while it is in
    assert swapped.phases(key) == {} and swapped.host_bytes(key) == 2 * 2 * 1720


def test_tokens_of_a_micro_batch():
    sampling = {"rollout_max_response_len": 60}
    assert role("actor", rollout=sampling).tokens == 60
    assert role("actor", rollout=sampling, batch={"micro_batch_size": 3}).tokens == 180
    packs = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100}
    assert role("actor", rollout=sampling, batch=packs).tokens == 100
    # one sample is longer than a pack
    assert role("actor", rollout={"rollout_max_response_len": 130}, batch=packs).tokens == 130
    assert (
        role(
            "actor", rollout={"rollout_max_response_len": 130}, batch=packs, parallel={"context_parallel_size": 2}
        ).tokens
        == 100
    )


def test_logits_are_worked_on_1024_tokens_at_a_time_unless_the_flag_says_otherwise():
    """11 columns: logits of 5000 tokens in bf16, and two fp32 tensors of those that are worked on."""

    def logits(**batch) -> int:
        actor = role("actor", batch={"use_dynamic_batch_size": True, "max_tokens_per_gpu": 5000} | batch)
        return actor.phases(actor.key(0))["train"]["logits"]

    assert logits() == 11 * (5000 * 2 + 1024 * 8)
    assert logits(log_probs_chunk_size=-1) == 11 * (5000 * 2 + 5000 * 8)


def test_tenants_hold_as_many_adapters_as_there_is_room_for():
    """Rank 2 on the output projection: 2 of them on the device, 5 in all; bf16, so 2 + 4 bytes a weight."""
    lora = LoraConfig(lora_rank=2, lora_target_modules=["o_proj"])
    config = plan_config(TINY, placement={"rollout_num_gpus": 1})
    base = RoleBytes(config, make_plan(config), "actor")
    tenants = RoleBytes(config, make_plan(config), "actor", TenantRoom(lora=lora, resident=2, held=5))
    phases, one = tenants.phases(tenants.key(0)), 2 * (8 + TINY.hidden_size) * TINY.num_layers
    assert TINY.num_attention_heads * TINY.head_size == 8
    assert phases["start"]["weights"] == phases["train"]["weights"] == 2 * base.key(0).held.num_parameters
    assert "adapter weights" not in phases["start"]
    assert phases["generate"]["adapter weights"] == 2 * 6 * one and phases["generate"]["optimizer"] == 2 * 8 * one
    assert (phases["generate"]["gradients"], phases["train"]["gradients"]) == (2 * 4 * one, 2 * 8 * one)
    assert tenants.host_bytes(tenants.key(0)) == 5 * 16 * one
    few = RoleBytes(config, make_plan(config), "actor", TenantRoom(lora=lora, resident=8, held=3))
    assert few.phases(few.key(0))["train"]["optimizer"] == 3 * 8 * one and few.host_bytes(few.key(0)) == 0
