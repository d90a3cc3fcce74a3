"""Evaluation on engines of its own (--eval-num-engines), beside rollouts and syncs that go to the others."""

from __future__ import annotations

import time

import pytest

from slime_like.errors import RunError
from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from tests.unit.rollout.rows import digits_row

#: Long enough for a sync to come and go while the first answers are made.
SLOW_S = 0.4


@pytest.fixture
def aside(sorting_script, decode):
    """The engine that is set aside: it takes its time."""
    engine = ScriptedEngine(sorting_script, decode=decode, fault_for=lambda _: Fault(delay_s=SLOW_S))
    engine.weight_version = "1"
    with engine:
        yield engine


@pytest.fixture
def start(start_manager, write_rows):
    """A manager whose router stands for the other engines, with weights 1."""

    def run(**options):
        path = write_rows([digits_row(n) for n in (4321, 8765, 11)], "held-out.jsonl")
        options = {"eval_prompt_data": ["held", path], "eval_interval": 1, "eval_async": True, **options}
        manager, others = start_manager(eval_num_engines=1, **options)
        others.weight_version = "1"
        manager.policy_changed(WeightsRef(version=1))
        return manager, others

    return run


def endpoint(engine: ScriptedEngine) -> EngineEndpoint:
    return EngineEndpoint(index=1, url=engine.url)


def wait_for_requests(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + 10
    while not engine.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_asks_only_these_engines_and_stays_of_its_version_through_syncs(start, aside):
    manager, others = start(n_samples_per_eval_prompt=2, async_mode="full")
    manager.begin_evaluate(0, [endpoint(aside)])
    wait_for_requests(aside)
    assert not manager.evaluation_is_over(0)
    manager.policy_changing()
    others.weight_version = "2"
    manager.policy_changed(WeightsRef(version=2), 1)
    assert {
        version for group in manager.generate(0).groups for s in group.samples for version in s.weight_versions
    } == {-1, 2}
    manager.policy_changing()  # a sync that does not end: nothing that the evaluation would wait for
    metrics = manager.evaluate(0)
    assert len(aside.requests) == 6 and metrics["eval/held/reward_mean"] == 1
    assert {name: metrics[name] for name in metrics if name.count("/") == 1 and name != "eval/seconds"} == {
        "eval/engines": 1,
        "eval/weight_version": 1,
    }
    assert SLOW_S < metrics["eval/seconds"] < 10
    sent = {tuple(body["input_ids"]) for body in aside.requests}
    assert not sent & {tuple(body["input_ids"]) for body in others.requests}, "evaluation and training are apart"


def test_weights_that_somebody_else_gave_such_an_engine_are_named(start, aside):
    manager, _ = start()
    manager.begin_evaluate(0, [endpoint(aside)])
    wait_for_requests(aside)
    aside.weight_version = "3"
    with pytest.raises(RunError, match=r"evaluation set held, prompt 0, sample 0: .* versions \[3\], but .* of base@1"):
        manager.evaluate(0)


def test_the_adapters_are_those_that_it_began_with(start, sorting_script, decode):
    """Also of what is asked again after a sync."""
    manager, others = start(update_weight_mode="adapter", lora_rank=4)
    manager.policy_changed(WeightsRef(name="policy", version=4))
    faults = [Fault(delay_s=SLOW_S, abort=1)] * 3
    with ScriptedEngine(sorting_script, decode=decode, faults=faults) as aside:
        manager.begin_evaluate(0, [endpoint(aside)])
        wait_for_requests(aside)
        manager.policy_changed(WeightsRef(name="policy", version=5), 1)
        assert manager.evaluate(0)["eval/weight_version"] == 4
        assert [body["lora_path"] for body in aside.requests] == ["policy@4"] * 6
    manager.generate(0)
    assert {body["lora_path"] for body in others.requests} == {"policy@5"}


def test_a_rollout_that_is_full_ends_nothing_of_the_evaluation(start, aside):
    """--partial-rollout ends what runs on the engines that serve it, and on no other."""
    slow_later = {"faults": [None] * 4 + [Fault(delay_s=5.0)] * 4}
    manager, others = start(
        partial_rollout=True,
        over_sampling_batch_size=4,
        engine_options=slow_later,
        more_engines=[endpoint(aside)],
    )
    manager.engines_changed([EngineEndpoint(index=0, url=others.url)])
    manager.begin_evaluate(0, [endpoint(aside)])
    wait_for_requests(aside)
    manager.generate(0)
    assert "/abort_request" in [path for path, _ in others.calls]
    assert manager.evaluate(0)["eval/held/failed_samples"] == 0 and len(aside.requests) == 3
    assert "/abort_request" not in [path for path, _ in aside.calls]
