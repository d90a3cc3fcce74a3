"""When samples share their prompts, what is refused and what is said about it."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.batch import BatchConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.share_prompt import share_prompt_notices, share_prompt_problems, shares_prompts

EXPERTS = {"num_experts": 8, "moe_aux_loss_coeff": 0.0, "moe_router_enable_expert_bias": False}


def run(asked: str = "auto", *, dynamic: bool = True, **groups) -> RunConfig:
    batch = BatchConfig(share_prompt=asked, use_dynamic_batch_size=dynamic, max_tokens_per_gpu=100 if dynamic else None)
    return RunConfig(batch=batch, **{"rollout": RolloutConfig(n_samples_per_prompt=8), **groups})


#: What cannot share its prompts, and the flag that is named.
IMPOSSIBLE = {
    "--use-dynamic-batch-size": run(dynamic=False),
    "--context-parallel-size 2": run(
        parallel=ParallelConfig(context_parallel_size=2), placement=PlacementConfig(actor_num_gpus_per_node=2)
    ),
}
#: What shares them only if asked, since a number would change.
CHANGED = {
    "--moe-aux-loss-coeff 0.01": {"model": ModelConfig(**EXPERTS | {"moe_aux_loss_coeff": 0.01})},
    "--moe-router-bias-update-rate 0.001": {"model": ModelConfig(**EXPERTS | {"moe_router_enable_expert_bias": True})},
    "--lora-dropout 0.1": {"lora": LoraConfig(lora_rank=4, lora_dropout=0.1)},
}


def asked_for(config: RunConfig, asked: str) -> RunConfig:
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, share_prompt=asked))


def test_by_default_where_nothing_changes():
    assert shares_prompts(run()) and shares_prompts(run("on")) and not shares_prompts(run("off"))
    assert shares_prompts(run(model=ModelConfig(**EXPERTS)))
    assert share_prompt_notices(run()) == share_prompt_problems(run()) == []


@pytest.mark.parametrize("named", IMPOSSIBLE)
def test_refused_by_name_or_said_aloud(named):
    config = IMPOSSIBLE[named]
    assert not shares_prompts(config) and share_prompt_problems(config) == []
    if config.batch.use_dynamic_batch_size:
        (notice,) = share_prompt_notices(config)
        assert notice.startswith("--share-prompt is off") and named in notice
    else:
        assert share_prompt_notices(config) == []  # samples come one by one, as asked
    (problem,) = share_prompt_problems(asked_for(config, "on"))
    assert problem.startswith("--share-prompt on: ") and named in problem and "Fix" in problem
    assert problem in asked_for(config, "on").problems()
    assert share_prompt_notices(asked_for(config, "off")) == []


@pytest.mark.parametrize("named", CHANGED)
def test_what_changes_a_number_is_done_only_if_asked(named):
    assert not shares_prompts(run(**CHANGED[named]))
    (notice,) = share_prompt_notices(run(**CHANGED[named]))
    assert named in notice and "--share-prompt on accepts it" in notice
    assert shares_prompts(run("on", **CHANGED[named])) and share_prompt_problems(run("on", **CHANGED[named])) == []
    (notice,) = share_prompt_notices(run("on", **CHANGED[named]))
    assert named in notice


def test_one_sample_a_prompt_has_nothing_to_share():
    lone = run(rollout=RolloutConfig(n_samples_per_prompt=1), **CHANGED["--lora-dropout 0.1"])
    assert share_prompt_notices(lone) == []
