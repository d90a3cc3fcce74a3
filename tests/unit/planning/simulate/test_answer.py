"""Where the next GPU goes, when async pays, and when it loses: cases that a reader can compute."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.planning.simulate.answer import COLOCATED, best_split, compare
from slime_like.planning.simulate.scenario import AsyncRules, EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.spread import Spread


def case(generate_s: float, train_s: float, *, sync_s: float = 0.0, **rules) -> Scenario:
    """16 answers on one engine of one GPU, whose decode step costs only by request; training on one GPU."""
    return Scenario(
        work=Workload(batch=16, group_size=1, response_tokens=Spread.constant(100)),
        engines=EnginePace(num_engines=1, base_s=1e-12, per_request_s=generate_s / 1600),
        trainer=TrainerPace(per_token_s=train_s / 1600, sync_s=Spread.constant(sync_s)),
        rules=AsyncRules(pause_mode="keep", **rules),
        steps=4,
    )


def test_rows_are_the_modes_and_the_same_gpus_in_turns():
    comparison = compare(case(4.0, 4.0, sync_s=0.5))
    steps = {row.name: row.outcome.step_s for row in comparison.rows}
    assert steps["off"] == pytest.approx(8.5) and steps["one-step"] == pytest.approx(4.5)
    assert steps[COLOCATED] == pytest.approx(2 + 2 + 0.5)  # twice the GPUs for each, in turns
    assert steps["full"] == pytest.approx(4.5)


def test_where_turns_are_as_fast_async_does_not_pay():
    """Both sides scale as well as they like, so nobody gains by overlapping: the simplest is named."""
    comparison = compare(case(6.0, 2.0, sync_s=0.1))
    assert comparison.best.name == COLOCATED
    assert comparison.verdict.startswith("async does not pay: off, colocated takes 4.1 s a step")
    assert any("loses against all 2 GPUs in turns: 1.49x" in reason for reason in comparison.reasons)


def test_where_engines_do_not_scale_async_pays():
    """Decoding costs by the step, not by the request: more engines help nobody, overlapping does."""
    scenario = case(4.0, 4.0).with_engines(base_s=0.04, per_request_s=0.0)
    comparison = compare(scenario)
    assert comparison.best.name == "one-step" and comparison.best.gain == pytest.approx(2.0)
    assert "one-step is 2.00x as fast as off: 4 s a step against 8 s" in comparison.verdict


@pytest.mark.parametrize(("generate_s", "train_s", "where"), [(8.0, 2.0, "engines"), (2.0, 8.0, "trainer")])
def test_the_next_gpu_goes_to_the_bottleneck(generate_s: float, train_s: float, where: str):
    for more in compare(case(generate_s, train_s)).next_gpus:
        assert more.where == where, more
        if more.mode == "one-step":
            assert more.with_engine == pytest.approx(0.5 if where == "engines" else 1.0)
            assert more.with_trainer == pytest.approx(1.0 if where == "engines" else 0.5)


def test_a_gpu_that_helps_nobody():
    scenario = case(4.0, 1.0).with_engines(base_s=0.04, per_request_s=0.0)
    more = next(more for more in compare(scenario).next_gpus if more.mode == "one-step")
    assert more.where == "nowhere"


def test_one_processor_for_both_makes_async_lose():
    comparison = compare(case(4.0, 4.0, sync_s=0.2, contention=1.2))
    row = next(row for row in comparison.rows if row.name == "one-step")
    assert row.gain < 1
    assert any(reason.startswith("one-step loses: 1.") for reason in comparison.reasons)
    assert any("share processors" in reason for reason in comparison.reasons)


def test_colocated_gpus_are_split_for_async():
    scenario = dataclasses.replace(case(12.0, 4.0), colocated=True).with_engines(num_engines=8)
    comparison = compare(scenario.with_trainer(num_gpus=8))
    names = [row.name for row in comparison.rows]
    assert names[0] == "off" and names[1].startswith("one-step, ") and names[1].endswith(" GPUs")
    assert comparison.next_gpus[0].where == "both"


def test_the_best_split_balances_both_sides():
    scenario = case(12.0, 4.0).with_rules(mode="one-step")
    split, outcome = best_split(scenario, 8)
    assert (split.engines.num_engines, split.trainer.num_gpus) == (6, 2)  # 12/6 = 4/2, but 16 answers on 6 engines
    assert outcome.step_s == min(
        compare(scenario.with_engines(num_engines=e).with_trainer_gpus(8 - e), next_gpu=False).rows[2].outcome.step_s
        for e in range(1, 8)
    )


def test_one_gpu_leaves_no_split():
    scenario = dataclasses.replace(case(4.0, 4.0), colocated=True)
    comparison = compare(scenario)
    assert [row.name for row in comparison.rows] == ["off"]
    assert "1 is too few" in comparison.verdict
