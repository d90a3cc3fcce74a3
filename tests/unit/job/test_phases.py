"""What a loop does in which order: whole runs of phases over parts that only write down their calls.

No Ray, no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from slime_like.cluster.engine_care import Tended
from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.config.loss import LossConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import EngineError, RunError
from slime_like.job.phases import Phases
from slime_like.loops import sync_loop
from slime_like.observability.console import ProgressConsole
from slime_like.observability.tracing import PhaseTrace
from slime_like.records import StepReport
from slime_like.utils.files import read_json_lines
from tests.unit.job.recorded_run import Run, config


def test_one_after_the_other(tmp_path):
    step = [
        "rollouts.generate {0}",
        "trainer.put",
        "trainer.train {0}",
        "rollouts.trained {2}",
        "rollouts.policy_changing",
        "engines.sync base@{1}",
        "rollouts.policy_changed base@{1}",
    ]
    assert Run(tmp_path, config()).go() == [
        "rollouts.policy_changing",
        "engines.sync base@1",
        "rollouts.policy_changed base@1",
        *(line.format(number, number + 2, (2 * number, 2 * number + 1)) for number in (0, 1) for line in step),
    ]
    kinds = [(line["kind"], line["step"]) for line in read_json_lines(tmp_path / "metrics.jsonl")]
    per_step = ["rollout", "train", "sync", "step"]
    assert kinds == [
        ("start", 0),
        ("sync", 0),
        *((kind, number + (kind == "sync")) for number in (0, 1) for kind in per_step),
    ]


def test_one_step_ahead_weights_change_when_nothing_is_generated_and_nothing_else_waits_for_it(tmp_path):
    options = {"checkpoint": CheckpointConfig(save=str(tmp_path), save_interval=2), "eval": EvalConfig(eval_interval=2)}
    run = Run(tmp_path, config(asynchrony=AsyncConfig(async_mode="one-step"), **options), num_rollout=3)
    calls = run.go()
    assert calls[calls.index("rollouts.generate 0") :] == [
        *("rollouts.generate 0", "rollouts.begin 1", "trainer.put", "trainer.train 0", "rollouts.trained (0, 1)"),
        *("rollouts.settle", "rollouts.policy_changing", "engines.sync base@2", "rollouts.policy_changed base@2"),
        "rollouts.begin 2",
        *("rollouts.generate 1", "rollouts.begin 2", "trainer.put", "trainer.train 1", "rollouts.trained (2, 3)"),
        *("rollouts.ahead 2", "rollouts.snapshot", "trainer.save 2"),  # it is kept with the checkpoint
        *("rollouts.settle", "rollouts.policy_changing", "engines.sync base@3", "rollouts.policy_changed base@3"),
        "rollouts.evaluate 2",
        *("rollouts.generate 2", "trainer.put", "trainer.train 2", "rollouts.trained (4, 5)"),
        *("rollouts.ahead 3", "rollouts.snapshot", "trainer.save 3"),
        *("rollouts.settle", "rollouts.policy_changing", "engines.sync base@4", "rollouts.policy_changed base@4"),
        "rollouts.evaluate 3",
    ]
    steps = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert all(line["async/trainer_idle_seconds"] == line["step/generate_seconds"] for line in steps)
    events = [json.loads(line.rstrip(",")) for line in (tmp_path / "trace.json").read_text().splitlines()[1:]]
    busy = [event for event in events if event["name"] == "engines generate"]
    assert [(event["args"]["step"], event["dur"]) for event in busy] == [(step, 1_000_000) for step in range(3)]


def test_weights_that_stay_for_two_rollouts(tmp_path):
    asynchrony = AsyncConfig(async_mode="one-step", update_weights_interval=2)
    calls = Run(tmp_path, config(asynchrony=asynchrony), num_rollout=4).go()
    wanted = ("rollouts.generate", "rollouts.begin", "rollouts.settle", "engines.sync")
    assert [call for call in calls if call.startswith(wanted)] == [
        *("engines.sync base@1", "rollouts.generate 0", "rollouts.begin 1", "rollouts.generate 1", "rollouts.begin 2"),
        *("rollouts.settle", "engines.sync base@2", "rollouts.begin 3"),
        *("rollouts.generate 2", "rollouts.begin 3", "rollouts.generate 3", "rollouts.settle", "engines.sync base@3"),
    ]
    plain = tmp_path / "plain"
    plain.mkdir()
    asynchrony = AsyncConfig(update_weights_interval=2)
    calls = Run(plain, config(asynchrony=asynchrony), num_rollout=4).go()
    assert [call[-1] for call in calls if call.startswith("engines.sync")] == ["1", "2", "3"]


def test_memory_changes_hands_around_training_and_comes_back_in_two_parts(tmp_path):
    calls = Run(tmp_path, config(placement=PlacementConfig(colocate=True)), num_rollout=1).go()
    sync = [
        "rollouts.policy_changing",
        "trainer.release_memory ('weights',)",
        "engines.resume_memory weights",
        "engines.sync base@{}",
        "trainer.release_memory ()",
        "engines.resume_memory kv_cache",
        "rollouts.policy_changed base@{}",
    ]
    around = [
        "rollouts.generate 0",
        "engines.release_memory",
        "trainer.put",
        "trainer.train 0",
        "rollouts.trained (0, 1)",
    ]
    assert calls == [line.format(1) for line in sync] + around + [line.format(2) for line in sync]
    (step,) = (line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "step")
    assert 0 < step["step/release_seconds"] <= step["step/overhead_seconds"]


def test_every_role_on_the_cards_makes_room_and_the_probe_comes_while_the_trainer_has_its_weights(tmp_path):
    """What the engines take must have been given back by all, and comparing needs the engines' KV cache."""
    loss = LossConfig(advantage_estimator="ppo", use_kl_loss=True)
    run = Run(
        tmp_path,
        config(
            placement=PlacementConfig(colocate=True, colocate_training=True),
            loss=loss,
            sync=SyncConfig(verify_weight_sync_interval=1),
        ),
        parts=("trainer", "critic", "reference", "engines", "rollouts"),
        trainer={"probe": [np.zeros(2)]},
    )
    phases = Phases(run.job, run.log, ProgressConsole(1), PhaseTrace(run.job.run.trace))
    phases.sync(0)
    others = ["critic.release_memory", "reference.release_memory"]
    assert run.calls == [
        "rollouts.policy_changing",
        *("trainer.release_memory ('weights',)", *others, "engines.resume_memory weights"),
        *("engines.sync base@1", "trainer.probe"),
        *("trainer.release_memory ()", *others, "engines.resume_memory kv_cache"),
        *("engines.compare base@1", "rollouts.policy_changed base@1"),
    ]


def test_apart_from_engines_nobody_makes_room(tmp_path):
    assert not [call for call in Run(tmp_path, config()).go() if "memory" in call]


def test_a_checkpoint_is_saved_before_the_engines_get_its_weights_and_evaluation_sees_them(tmp_path):
    options = {"checkpoint": CheckpointConfig(save=str(tmp_path), save_interval=1), "eval": EvalConfig(eval_interval=2)}
    calls = Run(tmp_path, config(**options)).go()
    order = [
        "trainer.train 1",
        "rollouts.snapshot",
        "trainer.save 2",
        "engines.sync base@3",
        "rollouts.policy_changed base@3",
        "rollouts.evaluate 2",
    ]
    assert [call for call in calls if call in order] == ["rollouts.snapshot", *order]
    assert calls.index("rollouts.evaluate 0") < calls.index("rollouts.generate 0")  # the first weights too


def test_a_probe_follows_the_first_sync_and_every_nth(tmp_path):
    calls = Run(tmp_path, config(sync=SyncConfig(verify_weight_sync_interval=2)), num_rollout=4).go()
    probed = [calls[at - 2] for at, call in enumerate(calls) if call.startswith("engines.compare")]
    assert probed == ["engines.sync base@1", "engines.sync base@3", "engines.sync base@5"]


def test_no_evaluation_before_training_if_not_wanted(tmp_path):
    calls = Run(tmp_path, config(eval=EvalConfig(eval_interval=1, skip_eval_before_train=True)), num_rollout=1).go()
    assert calls[-1] == "rollouts.evaluate 1" and sum("evaluate" in call for call in calls) == 1


def test_a_save_in_the_background_counts_once_it_is_whole(tmp_path):
    checkpoint = CheckpointConfig(save=str(tmp_path), save_interval=1, async_save=True)
    answers = iter([False, True, True, True])
    calls = Run(tmp_path, config(checkpoint=checkpoint), trainer={"finish_save": lambda: next(answers)}).go()
    saving = [call for call in calls if call.startswith(("trainer.save", "trainer.finish_save", "trainer.train"))]
    assert saving == [
        *("trainer.train 0", "trainer.save 1"),
        *("trainer.finish_save", "trainer.train 1", "trainer.finish_save", "trainer.save 2"),
        "trainer.finish_save",
    ]


def test_the_critic_is_fitted_first_and_the_policy_waits_for_its_turn(tmp_path):
    loss = LossConfig(advantage_estimator="ppo", kl_coef=0.1, num_critic_only_steps=1)
    report = StepReport(step=0, num_train_steps=1, num_samples=4, num_tokens=8, metrics={"train/value_loss": 1.0})
    critic = {"with_values": lambda samples: samples, "train": lambda step, samples: report}
    parts = ("trainer", "critic", "engines", "rollouts")
    calls = Run(
        tmp_path, config(loss=loss), parts=parts, critic=critic, trainer={"with_kl": lambda samples: samples}
    ).go()
    trained = [call for call in calls if call.startswith(("trainer", "critic"))]
    fitted = ["trainer.put", "trainer.with_kl", "critic.with_values", "critic.train {}"]
    assert trained == [*(line.format(0) for line in fitted), *(line.format(1) for line in fitted), "trainer.train 1"]


def test_a_reference_of_its_own_scores_and_follows(tmp_path):
    reference = {"with_reference": lambda samples: samples}
    parts = ("trainer", "reference", "engines", "rollouts")
    loss = LossConfig(use_kl_loss=True, ref_update_interval=2)
    calls = Run(tmp_path, config(loss=loss), parts=parts, reference=reference).go()
    folder = str(tmp_path / "reference")
    assert [call for call in calls if "reference" in call] == [
        "reference.with_reference",
        "reference.with_reference",
        f"trainer.save_hf {folder}",
        f"reference.take_weights {folder}",
    ]


def test_a_dead_engine_is_named_instead_of_what_it_led_to(tmp_path):
    dead = EngineError("engine 0 has ended")
    run = Run(tmp_path, config(), rollouts={"generate": RunError("no answer")}, engines={"check_after_failure": dead})
    with pytest.raises(EngineError, match="engine 0 has ended"):
        run.go()
    sending = Run(tmp_path, config(), engines={"check_after_failure": dead, "sync": RunError("sending failed")})
    with pytest.raises(EngineError, match="engine 0 has ended"):
        sending.go()
    assert "rollouts.policy_changed base@1" not in sending.calls  # nobody may generate with half of the weights


def test_one_step_ahead_engines_that_wait_for_weights_get_them_before_the_rollout_that_waits_for_engines(tmp_path):
    """The trainer has gone on, the only engine was replaced: the rollout ahead ends with the newer weights."""
    run = Run(tmp_path, config(asynchrony=AsyncConfig(async_mode="one-step")))
    looks = []

    def tend(trainer):
        looks.append(trainer)
        return Tended() if "rollouts.policy_changed base@2" in run.calls else Tended(enough=False, num_waiting=1)

    def settle(watch):
        run.job.tend = tend
        watch()
        run.job.tend = None

    run.job.rollouts.answers["settle"] = settle
    run.job.engines.num_deaths = 0
    calls = run.go()
    first = calls.index("rollouts.settle")
    assert calls[first : first + 2] == ["rollouts.settle", "rollouts.engines_looked_at"]
    assert calls.index("engines.sync base@2") < calls.index("engines.sync base@3"), "and the sync comes as always"
    assert looks[0] is None, "it cannot send what the engines served: it has trained since"


def test_a_resumed_run_goes_on_with_the_next_version(tmp_path):
    run = Run(tmp_path, config())
    run.job.num_rollouts_done, run.job.client_state = 1, {"rollout": {"data": {"position": 2}}, "weight_version": 7}
    calls = run.go()
    assert calls[:4] == [
        "rollouts.load_state_dict",
        "rollouts.policy_changing",
        "engines.sync base@8",
        "rollouts.policy_changed base@8",
    ]
    assert [call for call in calls if "generate" in call] == ["rollouts.generate 1"]


def test_rollouts_only(tmp_path):
    assert Run(tmp_path, config(), parts=("engines", "rollouts")).go() == ["rollouts.generate 0", "rollouts.generate 1"]


def test_phases_need_neither_ray_nor_torch():
    code = (
        "import sys, slime_like.loops.sync_loop; assert not {'ray', 'torch', 'megatron', 'sglang'} & set(sys.modules),"
        " sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_answers_can_be_read_in_the_run_directory(tmp_path):
    for count, lines in ((3, 3), (0, None)):
        folder = tmp_path / str(count)
        folder.mkdir()
        run = Run(folder, config(observability=ObservabilityConfig(log_samples=count)))
        with open(folder / "console.txt", "w") as console:
            sync_loop.run(run.job, run.log, ProgressConsole(2, console))
        files = {path.name: len(read_json_lines(path)) for path in sorted((folder / "samples").glob("*"))}
        assert files == ({} if lines is None else {"rollout-0.jsonl": lines, "rollout-1.jsonl": lines})
        shown = [line.split()[:2] for line in (folder / "console.txt").read_text().splitlines() if line[:2] == "  "]
        assert shown == (
            [] if lines is None else [["best", "1"], ["worst", "0"]] * 2
        )  # the first rollout, and the last
