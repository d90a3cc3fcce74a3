"""What routing replay needs of the rest of the flags, and what is said when it changes nothing."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.batch import BatchConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.run import RunConfig
from slime_like.config.slime_flags.notices import notices

FLAGS = ("use_routing_replay", "use_rollout_routing_replay")
DENSE = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=320)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32)


def replay_problems(config: RunConfig) -> list[str]:
    return [problem for problem in config.problems() if "routing-replay" in problem]


@pytest.mark.parametrize("name", FLAGS)
def test_a_model_with_experts_is_needed(name):
    loss = LossConfig(**{name: True})
    (problem,) = replay_problems(RunConfig(model=DENSE, loss=loss))
    assert problem.startswith(f"--{name.replace('_', '-')} needs a model with experts")
    assert replay_problems(RunConfig(model=EXPERTS, loss=loss)) == []


@pytest.mark.parametrize("name", FLAGS)
def test_supervised_rows_have_no_routing(name):
    (problem,) = replay_problems(RunConfig(model=EXPERTS, loss=LossConfig(loss_type="sft_loss", **{name: True})))
    assert "sft_loss samples none" in problem


def test_an_engine_that_is_told_not_to_report():
    engine = EngineConfig(sglang={"enable_return_routed_experts": "false"})
    (problem,) = replay_problems(
        RunConfig(model=EXPERTS, engine=engine, loss=LossConfig(use_rollout_routing_replay=True))
    )
    assert "--sglang-enable-return-routed-experts false" in problem


def test_one_step_replays_nothing():
    def said(steps, **flags):
        config = RunConfig(model=EXPERTS, loss=LossConfig(**flags), batch=BatchConfig(num_steps_per_rollout=steps))
        return [notice for notice in notices(config) if "routing-replay" in notice]

    (notice,) = said(1, use_routing_replay=True)
    assert notice.startswith("--use-routing-replay changes nothing with one step per rollout")
    assert said(2, use_routing_replay=True) == said(1, use_rollout_routing_replay=True) == []
