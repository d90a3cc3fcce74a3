"""When an evaluation beside training begins and is over, and what waits for it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.errors import EngineError
from slime_like.job.phases import Phases
from slime_like.observability.console import ProgressConsole
from slime_like.observability.tracing import PhaseTrace
from slime_like.utils.files import read_json_lines
from tests.unit.job.recorded_run import Run, config


def test_an_evaluation_beside_training_is_of_one_version(tmp_path):
    """Nothing waits for it but the next sync, and the end."""
    asynchrony = AsyncConfig(async_mode="full", eval_async=True)
    run = Run(tmp_path, config(asynchrony=asynchrony, eval=EvalConfig(eval_interval=1)), num_rollout=2)
    calls = [
        call for call in run.go() if call.split()[0].split(".")[1] in ("evaluate", "begin_evaluate", "sync", "train")
    ]
    assert calls == [
        *("engines.sync base@1", "rollouts.begin_evaluate 0", "trainer.train 0", "rollouts.evaluate 0"),
        *("engines.sync base@2", "rollouts.begin_evaluate 1", "trainer.train 1", "rollouts.evaluate 1"),
        *("engines.sync base@3", "rollouts.begin_evaluate 2", "rollouts.evaluate 2"),
    ]
    lines = [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"]
    assert lines == [0, 1, 2]


def calls_of_share(run: Run) -> list[str]:
    wanted = ("evaluate", "begin_evaluate", "sync", "train", "set_aside", "take_back", "engines_changed")
    return [call for call in run.go() if call.split()[0].split(".")[1] in wanted]


def run_with_share(folder: Path, interval: int, is_over, num_rollout: int = 3, **engines) -> Run:
    """One with --eval-num-engines. is_over: what is said of the evaluation when it is looked for."""
    asynchrony = AsyncConfig(async_mode="full", eval_async=True, eval_num_engines=1)
    run = Run(
        folder,
        config(asynchrony=asynchrony, eval=EvalConfig(eval_interval=interval)),
        num_rollout=num_rollout,
        rollouts={"evaluation_is_over": is_over},
        engines={"set_aside": ("engine 1",), **engines},
    )
    run.job.engines.endpoints = ("engine 0", "engine 1")
    return run


def test_with_engines_of_its_own_no_sync_waits_for_an_evaluation_but_the_one_before_the_next(tmp_path):
    run = run_with_share(tmp_path, 3, is_over=False)
    begins, changed = (
        ("engines.set_aside 1", "rollouts.engines_changed ('engine 0', 'engine 1')"),
        "rollouts.engines_changed ('engine 0', 'engine 1')",
    )
    ends = ("engines.take_back", changed)
    assert calls_of_share(run) == [
        *("engines.sync base@1", changed, *begins, "rollouts.begin_evaluate 0", "trainer.train 0"),
        *("engines.sync base@2", changed, "trainer.train 1", "engines.sync base@3", changed, "trainer.train 2"),
        *("rollouts.evaluate 0", *ends, "engines.sync base@4", changed),  # the next one begins with what all hold
        *(*begins, "rollouts.begin_evaluate 3", "rollouts.evaluate 3", *ends),
    ]
    lines = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [0, 3] and all(line["eval/waited_seconds"] >= 0 for line in lines)


def test_engines_come_back_as_soon_as_their_evaluation_is_seen_to_be_over(tmp_path):
    """It is looked for before each train step and before each sync."""
    for looks, place in ((1, "trainer.train 0"), (2, "engines.sync base@2"), (3, "trainer.train 1")):
        folder = tmp_path / str(looks)
        folder.mkdir()
        answers = iter([False] * (looks - 1) + [True] * 9)
        calls = calls_of_share(run_with_share(folder, 3, lambda step, answers=answers: next(answers)))
        assert calls[calls.index("engines.take_back") + 2] == place
        assert calls[calls.index("engines.take_back") - 1] == "rollouts.evaluate 0"


def test_an_engine_that_died_during_its_evaluation_is_named(tmp_path):
    dead = EngineError("engine 1 has ended")
    with pytest.raises(EngineError, match="engine 1 has ended"):
        run_with_share(tmp_path, 3, is_over=True, take_back=dead).go()


def test_an_evaluation_that_is_due_while_one_is_under_way_loses_neither(tmp_path):
    """Weights that stay for two rollouts: no sync lies between the first two evaluations."""
    asynchrony = AsyncConfig(async_mode="one-step", eval_async=True, update_weights_interval=2)
    Run(tmp_path, config(asynchrony=asynchrony, eval=EvalConfig(eval_interval=1)), num_rollout=2).go()
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"] == [0, 1, 2]


def saved_run(folder: Path, **asynchrony) -> tuple[Run, list[dict]]:
    """One that saves after each rollout, and what its checkpoints hold."""
    states: list[dict] = []
    trainer = {"save": lambda done, state: states.append(state) or f"checkpoint-{done}"}
    options = AsyncConfig(async_mode="full", eval_async=True, **asynchrony)
    checkpoint = CheckpointConfig(save=str(folder / "save"), save_interval=1)
    run = Run(
        folder,
        config(asynchrony=options, eval=EvalConfig(eval_interval=1), checkpoint=checkpoint),
        trainer=trainer,
        rollouts={"evaluation_is_over": False},
        engines={"set_aside": ("engine 1",)},
    )
    run.job.engines.endpoints = ("engine 0", "engine 1")
    return run, states


def test_a_checkpoint_comes_after_the_evaluation_of_the_weights_before(tmp_path):
    """A run that goes on from it has other weights: the result would be lost."""
    run, states = saved_run(tmp_path)
    calls = [call for call in run.go() if call.split()[0] in ("rollouts.evaluate", "trainer.save")]
    assert calls == [
        "rollouts.evaluate 0", "trainer.save 1", "rollouts.evaluate 1", "trainer.save 2", "rollouts.evaluate 2"
    ]  # fmt: skip
    assert [state["evaluating"] for state in states] == [None, None]


def test_an_evaluation_on_engines_of_its_own_that_a_resume_loses_is_named(tmp_path):
    run, states = saved_run(tmp_path, eval_num_engines=1)
    run.go()
    assert [state.get("evaluating") for state in states] == [0, 1]
    (tmp_path / "resumed").mkdir()
    resumed, _ = saved_run(tmp_path / "resumed")
    resumed.job.num_rollouts_done = 1
    resumed.job.client_state = {"rollout": {"data": {}}, "weight_version": 1, "evaluating": 0}
    notes = io.StringIO()
    phases = Phases(resumed.job, resumed.log, ProgressConsole(2, notes), PhaseTrace(resumed.job.run.trace))
    assert phases.restore() == 1
    assert "the evaluation after 0 rollouts was under way and has no result" in notes.getvalue()
