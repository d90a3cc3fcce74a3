"""Evaluation: its own data and flags, and nothing of the training's is moved."""

from __future__ import annotations

import pytest

from slime_like.config.evaluation import EvalSet
from slime_like.errors import RunError
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from tests.unit.rollout.rows import digits_row


@pytest.fixture
def evaluate(make_config, write_rows, sorting_script, decode):
    def run(rows=None, fault_for=None, **options):
        path = write_rows(rows or [digits_row(n) for n in (4321, 8765, 11)], "held-out.jsonl")
        config = make_config(eval_prompt_data=["held", path, "few", f"{path}@[0:1]"], eval_interval=1, **options)
        with ScriptedEngine(sorting_script, decode=decode, fault_for=fault_for) as engine:
            manager = RolloutManager(config, EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1))
            manager.start()
            try:
                return manager.evaluate(0), engine.requests, manager.snapshot()[0]["data"]["position"]
            finally:
                manager.close()

    return run


def test_metrics_of_each_set(evaluate):
    metrics, requests, position = evaluate(n_samples_per_eval_prompt=2)
    assert metrics["eval/held/pass@1"] == metrics["eval/few/pass@1"] == metrics["eval/held/reward_mean"] == 1
    assert metrics["eval/held/pass@2"] == 1 and "eval/held/pass@4" not in metrics
    assert metrics["eval/held/response_tokens_mean"] == 5 and metrics["eval/held/truncated_ratio"] == 0
    assert metrics["eval/held/samples"] == 6 and metrics["eval/few/samples"] == 2
    assert len(requests) == 8 and position == 0


def test_eval_flags_override_the_rollouts(evaluate):
    rows = [{"q": "sort 21", "gold": "12"}]
    keys = {"eval_input_key": "q", "eval_label_key": "gold"}
    metrics, requests, _ = evaluate(
        rows, **keys, eval_temperature=0.0, eval_top_p=0.5, eval_top_k=3, eval_max_response_len=2
    )
    params = requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_new_tokens"]) == (0.0, 0.5, 3, 2)
    assert metrics["eval/held/truncated_ratio"] == 1 and metrics["eval/held/pass@1"] == 0


def test_without_flags_the_rollouts_are_used(evaluate):
    _, requests, _ = evaluate(rollout_temperature=0.5)
    assert (
        requests[0]["sampling_params"]["temperature"] == 0.5 and requests[0]["sampling_params"]["max_new_tokens"] == 8
    )


def test_a_failed_sample_counts_as_wrong_and_is_told(evaluate, tokenizer):
    def fault_for(body):
        return Fault(status=400) if "8765" in tokenizer.decode(body["input_ids"]) else None

    metrics, _, _ = evaluate(fault_for=fault_for)
    assert metrics["eval/held/pass@1"] == pytest.approx(2 / 3) and metrics["eval/held/failed_samples"] == 1
    assert metrics["eval/few/pass@1"] == 1


def test_if_all_fail_the_run_ends(evaluate):
    with pytest.raises(RunError, match="all 3 samples failed. Last error"):
        evaluate(fault_for=lambda _: Fault(status=400))


def test_the_threshold_is_the_flags(evaluate):
    options = {"custom_rm_path": "tests.unit.rollout.user_functions.length_reward", "rm_type": None}
    metrics, _, _ = evaluate(eval_pass_threshold=0.625, **options)
    assert metrics["eval/held/reward_mean"] == 0.625 and metrics["eval/held/pass@1"] == 1
    assert evaluate(eval_pass_threshold=0.7, **options)[0]["eval/held/pass@1"] == 0


def test_sets_with_settings_of_their_own(start_manager, write_rows):
    """Two sets of one run: samples, sampling, limits, keys and reward of each, seen in what the engine is asked."""
    one = write_rows([digits_row(n) for n in (4321, 8765)], "one.jsonl")
    other = write_rows([{"question": "sort 21", "answer": "12 34"}], "other.jsonl")
    sets = (
        EvalSet(name="one", path=one, n_samples_per_eval_prompt=3, temperature=0.0, max_response_len=6),
        EvalSet(
            name="other",
            path=other,
            input_key="question",
            label_key="answer",
            rm_type="f1",
            min_new_tokens=2,
            stop=["!"],
            metadata_overrides={"level": 3},
        ),
    )
    manager, engine = start_manager(eval_sets=sets, eval_interval=1, eval_temperature=0.5)
    metrics = manager.evaluate(0)
    asked = [request["sampling_params"] for request in engine.requests]
    first, second = asked[:6], asked[6:]
    assert [params["temperature"] for params in asked] == [0.0] * 6 + [0.5]
    assert {params["max_new_tokens"] for params in first} == {6} and "min_new_tokens" not in first[0]
    assert second[0]["min_new_tokens"] == 2 and second[0]["stop"] == ["!"] and second[0]["max_new_tokens"] == 8
    assert metrics["eval/one/pass@2"] == 1 and metrics["eval/one/samples"] == 6
    assert metrics["eval/other/reward_mean"] == pytest.approx(2 / 3)  # "12" of "12 34": 2 x 1 / (1 + 2)
