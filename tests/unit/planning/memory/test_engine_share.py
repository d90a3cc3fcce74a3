"""What engines are started with on the cards that are there."""

from __future__ import annotations

import pytest

from slime_like.errors import PlacementError
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.engine_share import with_engine_share
from slime_like.planning.placement import make_plan
from tests.helpers.plan_models import QWEN3_8B, TINY, plan_config

COLOCATED = {"colocate": True, "actor_num_gpus_per_node": 2}


def share(card_gib: int | None, *, model=TINY, sglang: dict | None = None, **placement) -> str | None:
    config = plan_config(model, sglang=sglang, placement=COLOCATED | placement)
    card = None if card_gib is None else card_gib * GIB
    return with_engine_share(config, make_plan(config), card).engine.sglang.get("mem_fraction_static")


def test_the_flag_is_filled_in_for_the_card_that_is_there():
    """A process of the trainer stays, 1 GiB; SGLang keeps 10 GiB of large cards and 12 % of small ones."""
    assert share(80) == "0.873"  # 69 / 79
    assert share(24) == "0.88"
    assert share(8) == "0.657"  # 1 each for both processes, 1.4 for the engine's graphs: 4.6 / 7
    assert share(24, gpu_memory_gib=80.0) == "0.873"  # what was said about the cards


def test_a_flag_that_was_given_and_engines_apart_are_left_alone():
    assert share(80, sglang={"mem_fraction_static": "0.5"}) == "0.5"
    assert share(80, colocate=False, rollout_num_gpus=2) is None


def test_a_trainer_that_leaves_no_room_is_said_before_engines_start():
    with pytest.raises(PlacementError, match="no room for a KV cache: weights 15.3, .* gradients 30.5"):
        share(80, model=QWEN3_8B, offload_train=False)
    assert share(80, model=QWEN3_8B) == "0.873"
