"""The loop in each mode, over the real rollout side and a scripted engine, when a trainer is lost again and again: the
rollout side starts anew, and goes on from what the checkpoint says.
"""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import ProcessLost, RunError
from slime_like.job.parts import Parts
from slime_like.job.running import Job, ResolvedRun
from slime_like.job.trainer_restarts import TrainerRestarts
from slime_like.loops import sync_loop
from slime_like.megatron_backend.checkpoint.folder import Draft, find, read_client_state
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.records import EngineEndpoint, StepReport, SyncReceipt, TrainSample, WeightsRef
from slime_like.rollout.check_data import check_data
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import ScriptedEngine
from slime_like.utils.files import RunDirectory, read_json_lines
from tests.unit.loops.test_sync_loop import TINY, answer

NUM_ROLLOUTS, BATCH, GROUP = 5, 3, 2


@dataclasses.dataclass
class Blows:
    """(where, rollouts done there) at which the trainer is lost, each once."""

    left: list[tuple[str, int]]
    is_lost: bool = False

    def strike(self, where: str, done: int) -> None:
        """Raises what a phase raises then."""
        if (where, done) in self.left:
            self.left.remove((where, done))
            self.is_lost = True
            raise ProcessLost(f"trainer rank 0 died during {where}")


class LosableTrainer:
    """Remembers what each step was trained on last; its checkpoints are real folders."""

    def __init__(self, blows: Blows, folder: str):
        self.batches: dict[int, list[TrainSample]] = {}
        self._blows, self._folder = blows, folder

    def put(self, samples: list[TrainSample]) -> list[TrainSample]:
        return samples

    def train(self, step: int, samples: list[TrainSample]) -> StepReport:
        self._blows.strike("train", step)
        self.batches[step] = samples
        return StepReport(step=step, num_train_steps=1, num_samples=len(samples), num_tokens=1, metrics={})

    def save(self, num_done: int, state: dict) -> str:
        draft = Draft(
            folder=self._folder, number=num_done, record={"num_rollouts_done": num_done, "client_state": state}
        )
        draft.make()
        (Path(draft.path) / "shard").write_text("weights")
        self._blows.strike("save", num_done)
        draft.publish()
        return draft.final_path

    def finish_save(self, *, wait: bool) -> bool:
        return True

    def release_memory(self, keep: tuple[str, ...] = ()) -> None:
        pass


class Fleet:
    """One scripted engine, synced as weight_sync/session.py does, without weights."""

    num_members, num_deaths = 1, 0

    def __init__(self, engine: ScriptedEngine, pause_mode: str, blows: Blows):
        self.endpoints = (EngineEndpoint(index=0, url=engine.url),)
        self.router = types.SimpleNamespace(url=engine.url, api_key=None)
        self.clients = [EngineClient(self.endpoints[0])]
        self.versions: list[int] = []
        self._mode, self._blows = pause_mode, blows

    def sync(self, weights: WeightsRef, trainer: LosableTrainer, in_use: frozenset[WeightsRef]) -> SyncReceipt:
        (client,) = self.clients
        client.pause_generation(self._mode)
        self._blows.strike("sync", weights.version)
        client.update_weight_version(str(weights.version))
        client.continue_generation()
        self.versions.append(weights.version)
        return SyncReceipt(weights=weights, transport="none", num_tensors=1, num_bytes=1, seconds=0.0, digest="d")

    def note_deaths(self) -> dict:
        return {}

    def check_after_failure(self) -> None:
        pass


class LosableParts(Parts):
    """The real parts, but for the trainer's ranks."""

    blows: Blows

    def lost_ranks(self) -> dict[str, RunError]:
        return {"trainer rank 0": ProcessLost("")} if self.blows.is_lost else {}

    def lost_machines(self) -> list[str]:
        return []

    def begin_roles(self, config: RunConfig) -> None:
        self.blows.is_lost = False

    def wait_for_roles(self, clock) -> int | None:
        checkpoint = self.job.config.checkpoint
        if checkpoint.ckpt_step is not None:
            saved = read_client_state(find(checkpoint.load or "", checkpoint.ckpt_step))
            self.job.num_rollouts_done, self.job.client_state = saved["num_rollouts_done"], saved["client_state"]
        return None

    def watch(self) -> None:
        pass


MODES = {
    "off": {},
    "one-step": {"async_mode": "one-step"},
    "full": {"async_mode": "full", "max_staleness": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_is_trained_on_once_whenever_the_trainer_is_lost(tmp_path, mode):
    blows = Blows([("train", 0), ("sync", 2), ("save", 2), ("train", 3), ("sync", 6)])
    num_blows = len(blows.left)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "sort {number}", "label": "x"}}\n' for number in range(100)))
    saved = str(tmp_path / "saved")
    config = RunConfig(
        data=DataConfig(
            prompt_data=str(data), input_key="prompt", label_key="label", num_rollout=NUM_ROLLOUTS, rollout_shuffle=True
        ),
        checkpoint=CheckpointConfig(
            hf_checkpoint=str(TINY), save=saved, save_interval=1, max_trainer_restarts=num_blows
        ),
        model=ModelConfig(vocab_size=320, max_position_embeddings=64),
        rollout=RolloutConfig(rollout_batch_size=BATCH, n_samples_per_prompt=GROUP, rollout_max_response_len=8),
        reward=RewardConfig(rm_type="exact"),
        sync=SyncConfig(verify_weight_sync="off"),
        asynchrony=AsyncConfig(**MODES[mode]),
    )
    run = RunDirectory(str(tmp_path))
    with ScriptedEngine(answer, stop_token_ids=[299]) as engine:
        fleet = Fleet(engine, config.pause_mode, blows)
        resolved = ResolvedRun(
            config=config, plan=types.SimpleNamespace(), run=run, data=check_data(config), num_rollout=NUM_ROLLOUTS
        )
        job = Job(resolved=resolved, trainer=LosableTrainer(blows, saved), engines=fleet)
        parts = LosableParts(job, bundles=None, plan=None, logs="", fleet=fleet)
        parts.blows = blows
        parts.start_rollouts()
        job.restart_trainer = TrainerRestarts(job, parts).after
        trainer = job.trainer
        try:
            with open(tmp_path / "console.txt", "w") as console:
                sync_loop.run(job, MetricsLog(run, tensorboard=False), ProgressConsole(NUM_ROLLOUTS, console))
            ledger = job.rollouts.snapshot()[0]["data"]
        finally:
            job.close()
    assert blows.left == [] and (tmp_path / "console.txt").read_text().count("engines stayed") == num_blows
    assert sorted(trainer.batches) == list(range(NUM_ROLLOUTS))
    samples = [
        (one.prompt_index, one.sample_index) for step in sorted(trainer.batches) for one in trainer.batches[step]
    ]
    assert sorted(samples) == [(prompt, number) for prompt in range(NUM_ROLLOUTS * BATCH) for number in range(GROUP)]
    assert ledger["trained"] == NUM_ROLLOUTS * BATCH and ledger["dropped"] == {}
    assert all(batch[0].tokens[-5:].tolist() == [40, 41, 42, 43, 299] for batch in trainer.batches.values())
    for step, batch in trainer.batches.items():
        newest = max(int(one.weight_versions[one.loss_mask != 0].max()) for one in batch)
        assert newest <= step + 1, "of weights from before the step, whatever engines had held"
    lines = [(line["kind"], line["step"]) for line in read_json_lines(run.metrics) if line["kind"] != "start"]
    assert len(lines) == len(set(lines)), "what is done again stands there once"
    per_step = [("rollout", step) for step in range(NUM_ROLLOUTS)] + [("train", step) for step in range(NUM_ROLLOUTS)]
    assert set(per_step) <= set(lines)
    # the start; struck before the first checkpoint; in the sync behind it; ...
    assert fleet.versions[0] == 1 and fleet.versions[-1] == NUM_ROLLOUTS + 1
    assert all(after - before <= 1 for before, after in zip(fleet.versions, fleet.versions[1:], strict=False))
