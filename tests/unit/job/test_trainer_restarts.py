"""When a lost rank is started anew, from where, and when it ends the run. With processes: tests/e2e."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.run import RunConfig
from slime_like.config.serving import ServingConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import CheckpointError, EngineError, ProcessLost, WeightSyncError
from slime_like.job.running import Job, ResolvedRun
from slime_like.job.trainer_restarts import TrainerRestarts
from slime_like.megatron_backend.checkpoint.folder import Draft
from slime_like.records import StepReport
from slime_like.rollout.data_source import DataSource
from slime_like.utils.files import RunDirectory, append_json_line, read_json_lines
from tests.unit.job.recorded_run import Run, config

LOST = {"trainer rank 1": ProcessLost("trainer rank 1 died")}


class Parts:
    """Writes down what is asked of it. deaths: what `lost_ranks` gives, call by call; the last for good."""

    def __init__(self, job: Job, deaths: list[dict], machines: tuple[str, ...] = (), failures: list | None = None):
        self.job, self.deaths, self.machines, self.failures = job, deaths, machines, failures or []
        self.calls: list[str] = []
        self.configs: list[RunConfig] = []

    def lost_ranks(self) -> dict:
        return self.deaths.pop(0) if len(self.deaths) > 1 else self.deaths[0]

    def lost_machines(self) -> tuple[str, ...]:
        return self.machines

    def end_roles(self) -> None:
        self.calls.append("end")

    def begin_roles(self, config: RunConfig) -> None:
        self.calls.append("begin")
        self.configs.append(config)

    def wait_for_roles(self, clock) -> int | None:
        self.calls.append("wait")
        if self.failures:
            raise self.failures.pop(0)
        clock.lap("waiting for the trainer")
        step = self.configs[-1].checkpoint.ckpt_step
        self.job.num_rollouts_done, self.job.client_state = step or 0, {"rollout": {}} if step else {}
        return None

    def start_rollouts(self) -> None:
        self.calls.append("rollouts")

    def watch(self) -> None:
        self.calls.append("watch")


EVERYTHING = ["end", "begin", "wait", "rollouts", "watch"]


def job_in(folder: Path, *, most: int = 2, **groups) -> Job:
    checkpoint = CheckpointConfig(save=str(folder / "saved"), max_trainer_restarts=most)
    config = dataclasses.replace(RunConfig(), **({"checkpoint": checkpoint} | groups))
    data = DataSource([], config.data, path="", tokenizer=None, max_tokens=0)
    resolved = ResolvedRun(
        config=config, plan=types.SimpleNamespace(), run=RunDirectory(str(folder)), data=data, num_rollout=9
    )
    for step in range(4):
        append_json_line(resolved.run.metrics, {"kind": "step", "step": step})
    resolved.run.dropped.write_text('{"prompt": 1, "why": "stale"}\n')
    job = Job(resolved)
    job.num_rollouts_done, job.client_state = 0, {"of": "a start"}
    return job


def save(job: Job, number: int, *, ours: bool = True) -> Path:
    draft = Draft(folder=job.config.checkpoint.save or "", number=number, record={})
    draft.make()
    (Path(draft.path) / "shard").write_text("weights")
    draft.publish()
    if ours:
        job.saved.add(number)
    return Path(draft.final_path)


def steps(job: Job) -> list[int]:
    return [line["step"] for line in read_json_lines(job.run.metrics)]


def test_from_the_newest_checkpoint_of_this_run_that_is_whole(tmp_path):
    job = job_in(tmp_path)
    parts = Parts(job, [LOST])
    restarts = TrainerRestarts(job, parts)
    for number in (1, 2, 3):
        folder = save(job, number)
    (folder / "shard").write_text("torn")
    save(job, 7, ours=False)  # of a run before, in the same folder
    notes = restarts.after(ProcessLost("trainer rank 1 died during train"))
    assert parts.calls == EVERYTHING
    checkpoint = parts.configs[0].checkpoint
    assert (checkpoint.load, checkpoint.ckpt_step) == (checkpoint.save, 2) and job.config is parts.configs[0]
    assert job.num_rollouts_done == 2 and steps(job) == [0, 1], "what is done again is taken out"
    assert job.run.dropped.exists(), "the ledger says which of its lines go"
    assert notes[0] == "trainer rank 1 died during train"
    assert notes[1].startswith("trainer rank 1 lost: all training ranks were started anew from the checkpoint after 2")
    assert "restart 1 of --max-trainer-restarts 2" in notes[1]


def test_from_the_start_where_nothing_was_saved(tmp_path):
    job = job_in(tmp_path, checkpoint=CheckpointConfig(load="model", max_trainer_restarts=1))
    first = job.config
    parts = Parts(job, [LOST])
    assert "from the start in" in TrainerRestarts(job, parts).after(ProcessLost("x"))[1]
    assert parts.configs == [first] and steps(job) == [] and job.client_state == {} and not job.run.dropped.exists()


def test_what_the_run_was_resumed_from_counts_as_its_own(tmp_path):
    job = job_in(tmp_path)
    save(job, 3, ours=False)
    own = dataclasses.replace(job.config.checkpoint, load=job.config.checkpoint.save, ckpt_step=3)
    job.resolved = dataclasses.replace(job.resolved, config=dataclasses.replace(job.config, checkpoint=own))
    job.num_rollouts_done = 3
    parts = Parts(job, [LOST])
    assert "after 3 rollouts" in TrainerRestarts(job, parts).after(ProcessLost("x"))[1]


def test_a_run_that_was_struck_behind_its_last_step_does_what_comes_after(tmp_path):
    job = job_in(tmp_path)
    job.resolved = dataclasses.replace(job.resolved, num_rollout=4)
    save(job, 4)
    append_json_line(job.run.metrics, {"kind": "sync", "step": 4})
    TrainerRestarts(job, Parts(job, [LOST])).after(ProcessLost("x"))
    assert job.resolved.ends_only and steps(job) == [0, 1, 2, 3]


def test_an_error_of_a_rank_that_lives_ends_the_run(tmp_path):
    job = job_in(tmp_path)
    parts = Parts(job, [{}])
    error = EngineError("engine 0 ended")
    with pytest.raises(EngineError) as raised:
        TrainerRestarts(job, parts).after(error)
    assert raised.value is error and parts.calls == [] and not hasattr(error, "__notes__")


def test_an_error_that_a_death_led_to_is_a_death(tmp_path):
    job = job_in(tmp_path)
    parts = Parts(job, [LOST])
    TrainerRestarts(job, parts).after(WeightSyncError("trainer source 0 has not answered"))
    assert parts.calls == EVERYTHING


@pytest.mark.parametrize(
    ("most", "groups", "machines", "word"),
    [
        (1, {}, (), "--max-trainer-restarts 1 is used up"),
        (9, {}, ("10.0.0.7",), "the machine 10.0.0.7 is gone"),
        (9, {"sync": SyncConfig(update_weight_mode="delta")}, (), "--update-weight-mode delta"),
        (9, {"serving": ServingConfig(serve_rollout=True)}, (), "--serve-port"),
    ],
)
def test_where_it_is_impossible_the_error_says_why(tmp_path, most, groups, machines, word):
    job = job_in(tmp_path, most=most, **groups)
    parts = Parts(job, [LOST], machines)
    restarts = TrainerRestarts(job, parts)
    if most == 1:
        restarts.after(ProcessLost("the first"))
        parts.calls.clear()
    with pytest.raises(ProcessLost, match="the second") as raised:
        restarts.after(ProcessLost("the second"))
    assert parts.calls == [] and word in raised.value.__notes__[0]
    assert raised.value.__notes__[0].startswith("trainer rank 1 cannot be started anew: ")


def test_none_are_wanted(tmp_path):
    job = job_in(tmp_path, most=0)
    with pytest.raises(ProcessLost):
        TrainerRestarts(job, Parts(job, [LOST])).after(ProcessLost("x"))


def test_a_rank_that_dies_while_it_starts_is_started_again(tmp_path):
    job = job_in(tmp_path)
    parts = Parts(job, [LOST], failures=[ProcessLost("again")])
    note = TrainerRestarts(job, parts).after(ProcessLost("x"))[1]
    assert parts.calls == ["end", "begin", "wait", *EVERYTHING] and "restart 2 of" in note


def test_a_mistake_that_shows_while_it_starts_ends_the_run(tmp_path):
    job = job_in(tmp_path)
    with pytest.raises(CheckpointError):
        TrainerRestarts(job, Parts(job, [LOST], failures=[CheckpointError("torn")])).after(ProcessLost("x"))


def lost_once(job_of_run: Run, step: int):
    """A trainer that dies once, in this step, after rollout 1 was saved."""
    report = StepReport(step=step, num_train_steps=1, num_samples=1, num_tokens=4, metrics={})
    blows = [ProcessLost("trainer rank 0 died during train")]

    def train(at: int, samples) -> StepReport:
        if at == step and blows:
            raise blows.pop()
        return report

    def restart(error) -> tuple[str, ...]:
        job_of_run.calls.append(f"restart after {error}")
        job_of_run.job.num_rollouts_done = max(job_of_run.job.saved, default=0)
        job_of_run.job.client_state = {"rollout": {"data": {}}, "weight_version": 1}
        return ("started anew",)

    job_of_run.job.trainer.answers["train"] = train
    job_of_run.job.restart_trainer = restart


def test_the_loop_goes_on_from_the_checkpoint_with_a_sync_first(tmp_path):
    run = Run(tmp_path, config(checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=1)), num_rollout=2)
    lost_once(run, 1)
    calls = run.go()
    after = calls[calls.index("restart after trainer rank 0 died during train") + 1 :]
    assert after[:6] == [
        *("rollouts.load_state_dict", "rollouts.policy_changing", "engines.sync base@2"),
        *("rollouts.policy_changed base@2", "rollouts.generate 1", "trainer.put"),
    ], "the version counts on from the checkpoint's"
    assert after.count("trainer.save 2") == 1 and run.job.saved == {1, 2}


def test_who_cannot_restart_ends(tmp_path):
    run = Run(tmp_path, config())
    lost_once(run, 0)
    run.job.restart_trainer = None
    with pytest.raises(ProcessLost, match="trainer rank 0 died during train"):
        run.go()
