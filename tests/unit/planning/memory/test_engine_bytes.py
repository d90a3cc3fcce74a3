"""One GPU of an engine, counted by hand for a tiny model: 3 layers, hidden 8, MLP 10, 2 heads of 4, 11 words."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.planning.hardware import GIB
from slime_like.planning.memory.engine_bytes import colocated_share, engine_bytes, engine_elements, mem_fraction
from tests.helpers.plan_models import TINY, plan_config

EMBEDDING = OUTPUT = 11 * 8
QKV, PROJECTION, MLP, NORMS = 3 * 8 * 8, 8 * 8, 3 * 8 * 10, 2 * 8
LAYER = QKV + PROJECTION + MLP + NORMS
WHOLE = 3 * LAYER + EMBEDDING + OUTPUT + 8


def elements(model=TINY, *, tp: int = 1, pp: int = 1) -> int:
    return engine_elements(model, tp=tp, attention_tp=tp, pp=pp)


def test_one_gpu_holds_everything():
    assert elements() == WHOLE == 1720


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms():
    assert elements(tp=2) == 3 * ((QKV + PROJECTION + MLP) // 2 + NORMS) + EMBEDDING // 2 + OUTPUT // 2 + 8


def test_the_fullest_stage_has_one_end():
    assert elements(pp=3) == LAYER + EMBEDDING
    assert elements(pp=2) == 2 * LAYER + EMBEDDING  # of 3 layers


def test_fewer_key_heads_than_ranks_are_repeated():
    one_key_head = dataclasses.replace(TINY, group_query_attention=True, num_query_groups=1)
    queries_and_keys = (1 + 1 + 1) * 4 * 8  # of each rank
    assert (
        elements(one_key_head, tp=2)
        == 3 * (queries_and_keys + (PROJECTION + MLP) // 2 + NORMS) + EMBEDDING // 2 + OUTPUT // 2 + 8
    )


@pytest.mark.parametrize(
    ("sglang", "card_gib", "share"), [({"mem_fraction_static": "0.8"}, 80, 0.8), ({}, 80, 1 - 10 / 80), ({}, 40, 0.88)]
)
def test_the_share_for_weights_and_cache(sglang: dict, card_gib: int, share: float):
    assert mem_fraction(plan_config(TINY, sglang=sglang), card_gib * GIB) == pytest.approx(share)


def test_the_cache_gets_what_the_weights_leave():
    config = plan_config(TINY, sglang={"mem_fraction_static": "0.5", "chunked_prefill_size": "100"})
    sizes = engine_bytes(config, 4 * GIB)
    assert (sizes.weights, sizes.kv_cache) == (2 * WHOLE, 2 * GIB - 2 * WHOLE)
    assert sizes.work == 100 * 2 * (3 * 8 + 4 * 10)  # a chunk of prompts in one layer


def test_an_engine_that_serves_adapters_keeps_room_for_its_batch():
    """Rank 4 on the output projection of each layer, for two adapters and the base, in bf16."""
    flags = {"enable_lora": True, "max_lora_rank": "4", "lora_target_modules": ["o_proj"], "max_loras_per_batch": "3"}
    static = {"mem_fraction_static": "0.5", "chunked_prefill_size": "100"}
    without, served = (engine_bytes(plan_config(TINY, sglang=static | more), 4 * GIB) for more in ({}, flags))
    queries = TINY.num_attention_heads * TINY.head_size
    one = 4 * (queries + TINY.hidden_size) * TINY.num_layers
    assert (without.adapters, served.adapters) == (0, 3 * 2 * one)
    assert without.kv_cache - served.kv_cache == served.adapters
    # flags of an engine of one's own
    every = engine_bytes(plan_config(TINY, sglang=static | {"enable_lora": True, "max_lora_rank": "4"}), 4 * GIB)
    assert every.adapters > 8 / 3 * served.adapters
    assert engine_bytes(plan_config(TINY, sglang=static | {"enable_lora": True}), 4 * GIB).adapters == 0


def test_beside_a_trainer_the_share_is_of_what_is_free_at_the_start_and_fits_every_phase():
    """A card of 40 GiB; the trainer has 10 at the start and 20 while engines generate, whose work is 2.

    Its process and graphs are 2.4.
    """
    config = plan_config(TINY, placement={"colocate": True})
    beside = {"start": 10 * GIB, "generate": 20 * GIB, "score": 39 * GIB, "train": 39 * GIB, "sync": 15 * GIB}
    assert colocated_share(config, 40 * GIB, beside, 2 * GIB) == 0.52  # (40 - 20 - 1 - 1.4 - 2) / (40 - 10)
    alone = beside | {"start": GIB, "generate": GIB}
    assert colocated_share(config, 40 * GIB, alone, 2 * GIB) == 0.88  # SGLang's own reserve on a card below 60 GiB
    stays = plan_config(TINY, placement={"colocate": True, "offload_rollout": False})
    assert colocated_share(stays, 40 * GIB, beside, 2 * GIB) == 0.0  # 40 - 39 - 1 beside the train step
    assert colocated_share(config, 40 * GIB, beside | {"start": 41 * GIB}, 0) == 0.0
