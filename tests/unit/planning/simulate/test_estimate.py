"""The plan's estimate by the arithmetic that the docs tell."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.planning.memory.parameters import model_parameters
from slime_like.planning.report.render import make_report
from slime_like.planning.simulate.estimate import (
    CARD_FLOPS,
    CARD_MEMORY_RATE,
    DECODE_SHARE,
    TRAINING_SHARE,
    active_parameters,
    verdict_line,
)

MODEL = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, vocab_size=150_000, swiglu=True,
    normalization="RMSNorm", disable_bias_linear=True,
)  # fmt: skip


def config(**placement) -> RunConfig:
    defaults = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}
    return dataclasses.replace(
        RunConfig(model=MODEL),
        placement=PlacementConfig(**{**defaults, **placement}),
        rollout=RolloutConfig(rollout_batch_size=64, n_samples_per_prompt=8, rollout_max_response_len=4000),
    )


def test_decoding_reads_every_weight_and_training_takes_eight_operations():
    pace = make_report(config()).pace
    assert pace is not None
    size = model_parameters(MODEL)
    width = 4 if config().optimizer.bf16 is None else 2  # as the run would have it
    bytes_read = size * 2 if pace.engines.base_s < 0.009 else size * width
    assert pace.engines.base_s == pytest.approx(max(0.005, bytes_read / (2 * CARD_MEMORY_RATE * DECODE_SHARE)))
    assert pace.trainer.per_token_s == pytest.approx(8 * size / (8 * CARD_FLOPS * TRAINING_SHARE))
    assert (pace.engines.num_engines, pace.engines.gpus_per_engine, pace.trainer.num_gpus) == (4, 2, 8)
    assert pace.work.response_tokens.mean == 1000 and pace.work.response_tokens.limit == 4000


def test_of_experts_only_the_chosen_are_met():
    experts = dataclasses.replace(MODEL, num_experts=16, moe_router_topk=4, moe_ffn_hidden_size=512)
    expert = 3 * 4096 * 512  # gate, up, down
    assert model_parameters(experts) - active_parameters(experts) == 32 * 12 * expert
    assert active_parameters(MODEL) == model_parameters(MODEL)


def test_the_verdict_is_one_line_and_stands_in_the_plan():
    report = make_report(config())
    line = verdict_line(report.pace)
    assert line in report.text().splitlines() and line.startswith("async (estimate, as of H100 cards")
    assert report.to_dict()["async"]["verdict"] in line
    colocated = make_report(config(colocate=True, rollout_num_gpus=None))
    assert colocated.pace.colocated and "async (estimate" in colocated.text()


def test_a_real_run_has_no_estimate():
    assert make_report(config(), planning=False).pace is None
    assert "async" not in make_report(config(), planning=False).to_dict()


def test_nothing_to_overlap():
    for mode in ("debug_train_only", "debug_rollout_only"):
        assert make_report(config(**{mode: True})).pace is None
