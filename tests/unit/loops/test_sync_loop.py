"""The loop in each mode over the real rollout side, a scripted engine with a real pause, and a trainer that only takes
its time.
"""

from __future__ import annotations

import itertools
import time
import types
from pathlib import Path

import numpy as np
import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.job.running import Job, ResolvedRun
from slime_like.loops import sync_loop
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.records import EngineEndpoint, StepReport, SyncReceipt, TrainSample, WeightsRef
from slime_like.rollout.check_data import check_data
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.files import RunDirectory, read_json_lines

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"
NUM_ROLLOUTS, BATCH, GROUP = 6, 3, 2
TRAIN_S, SYNC_S = 0.15, 0.05


class SlowTrainer:
    """Takes its time, and remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[TrainSample]] = []

    def put(self, samples: list[TrainSample]) -> list[TrainSample]:
        return samples

    def train(self, step: int, samples: list[TrainSample]) -> StepReport:
        self.batches.append(samples)
        time.sleep(TRAIN_S)
        return StepReport(step=step, num_train_steps=1, num_samples=len(samples), num_tokens=1, metrics={})

    def release_memory(self, keep: tuple[str, ...] = ()) -> None:
        pass


class PausedEngines:
    """Syncs as weight_sync/session.py does, without weights."""

    num_members = 1

    def __init__(self, engine: ScriptedEngine, pause_mode: str):
        self._client, self._mode = EngineClient(EngineEndpoint(index=0, url=engine.url)), pause_mode

    def sync(self, weights: WeightsRef, trainer: SlowTrainer, in_use: frozenset[WeightsRef]) -> SyncReceipt:
        self._client.pause_generation(self._mode)
        time.sleep(SYNC_S)
        self._client.update_weight_version(str(weights.version))
        self._client.continue_generation()
        return SyncReceipt(weights=weights, transport="none", num_tensors=1, num_bytes=1, seconds=0.0, digest="d")

    def check_after_failure(self) -> None:
        pass


def answer(ids: list[int]) -> tuple[list[int], list[float]]:
    """Four tokens and the end, whatever was said already."""
    rest = [40, 41, 42, 43, 299]
    start = next((count for count in range(4, 0, -1) if ids[-count:] == rest[:count]), 0)
    return rest[start:], [-0.5] * (5 - start)


def played(tmp_path: Path, asynchrony: AsyncConfig, *, pause: str | None = None, rollout: dict | None = None):
    """(samples of each train step, metric lines of the rollouts, seconds of the loop) of a whole run."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "sort {number}", "label": "x"}}\n' for number in range(100)))
    config = RunConfig(
        data=DataConfig(
            prompt_data=str(data), input_key="prompt", label_key="label", num_rollout=NUM_ROLLOUTS, rollout_shuffle=True
        ),
        checkpoint=CheckpointConfig(hf_checkpoint=str(TINY)),
        model=ModelConfig(vocab_size=320, max_position_embeddings=64),
        rollout=RolloutConfig(
            rollout_batch_size=BATCH, n_samples_per_prompt=GROUP, rollout_max_response_len=8, **(rollout or {})
        ),
        reward=RewardConfig(rm_type="exact"),
        sync=SyncConfig(verify_weight_sync="off", update_weight_pause_mode=pause),
        asynchrony=asynchrony,
    )
    delays = itertools.cycle([0.01, 0.02, 0.25, 0.01, 0.08])  # some answers take as long as training
    faults = {"fault_for": lambda body: Fault(delay_s=next(delays))}
    with ScriptedEngine(answer, stop_token_ids=[299], **faults) as engine:
        endpoint = EngineEndpoint(index=0, url=engine.url)
        access = EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1, endpoints=(endpoint,))
        manager, trainer = RolloutManager(config, access), SlowTrainer()
        source = check_data(config)
        manager.start(source)
        resolved = ResolvedRun(
            config=config,
            plan=types.SimpleNamespace(),
            run=RunDirectory(str(tmp_path)),
            data=source,
            num_rollout=NUM_ROLLOUTS,
        )
        engines = PausedEngines(engine, config.pause_mode)
        job = Job(resolved=resolved, trainer=trainer, engines=engines, rollouts=manager, closing=[manager])
        started = time.monotonic()
        try:
            with open(tmp_path / "console.txt", "w") as console:
                sync_loop.run(job, MetricsLog(job.run, tensorboard=False), ProgressConsole(NUM_ROLLOUTS, console))
            seconds = time.monotonic() - started
        finally:
            job.close()
    lines = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "rollout"]
    return trainer.batches, lines, seconds


MODES = {
    "off": ({}, {}, 0),
    "off, weights for two": ({"update_weights_interval": 2}, {}, 1),
    "one-step": ({"async_mode": "one-step"}, {}, 1),
    "full, retract": ({"async_mode": "full", "max_staleness": 2}, {}, 2),
    "full, abort": ({"async_mode": "full", "max_staleness": 2}, {"pause": "abort"}, 2),
    "full, weights for two": ({"async_mode": "full", "max_staleness": 2, "update_weights_interval": 2}, {}, 2),
    "partial": ({"partial_rollout": True}, {"rollout": {"over_sampling_batch_size": 5}}, NUM_ROLLOUTS),
    "partial, bounded": (
        {"partial_rollout": True, "max_staleness": 1},
        {"rollout": {"over_sampling_batch_size": 5}},
        1,
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_every_prompt_is_trained_on_once_and_in_time(tmp_path, name: str):
    fields, options, bound = MODES[name]
    batches, lines, _ = played(tmp_path, AsyncConfig(**fields), **options)
    assert [len(batch) for batch in batches] == [BATCH * GROUP] * NUM_ROLLOUTS
    samples = [(sample.prompt_index, sample.sample_index) for batch in batches for sample in batch]
    assert len(set(samples)) == len(samples)
    interval, oldest = fields.get("update_weights_interval", 1), 0
    for step, batch in enumerate(batches):
        assert all(
            sample.tokens[-5:].tolist() == [40, 41, 42, 43, 299] for sample in batch
        )  # whole, however often ended
        for sample in batch:
            versions = sample.weight_versions[sample.loss_mask != 0]
            trained_on = (versions - 1) * interval  # version 1 is the first, and each sync counts one up
            assert (np.diff(versions) >= 0).all() and (step - trained_on <= bound).all(), (step, versions)
            oldest = max(oldest, int((step - trained_on).max()))
    if name.startswith("full"):
        assert oldest >= 1 and all(line["async/dropped_groups"] == 0 for line in lines)
    if "partial" not in name:
        assert sorted(samples) == [(p, s) for p in range(NUM_ROLLOUTS * BATCH) for s in range(GROUP)]
    assert all(("async/staleness_max" in line) == (name != "off") for line in lines)


@pytest.mark.long_run
def test_what_overlaps_takes_no_time_of_its_own(tmp_path):
    """Each rollout has an answer of 0.25 s; training takes 0.15 s. Long, because it compares times."""
    times = {}
    for mode in ("off", "one-step", "full"):
        (tmp_path / mode).mkdir()
        staleness = {"max_staleness": 3} if mode == "full" else {}
        times[mode] = played(tmp_path / mode, AsyncConfig(async_mode=mode, **staleness))[2]
    assert max(times["full"], times["one-step"]) < times["off"] - 0.3, times
