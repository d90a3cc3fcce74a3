"""The loop over the real rollout side and real checkpoint folders, killed (SIGKILL) again and again wherever it just
is: each prompt is trained on exactly once or dropped by name, and the trainer ends with the weights that it has when
nobody kills it and it is given the same groups in the same order.
"""

from __future__ import annotations

import collections
import hashlib
import os
import random
import signal
import time
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.job import resume
from slime_like.job.running import Job, ResolvedRun
from slime_like.loops import sync_loop
from slime_like.megatron_backend.checkpoint.folder import Draft, find, read_client_state
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.records import EngineEndpoint, StepReport, SyncReceipt, TrainSample, WeightsRef
from slime_like.rollout.check_data import check_data
from slime_like.rollout.debug_data import load_rollout
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.rollout.train_samples import train_samples_of
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.files import RunDirectory, read_json_lines

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"
NUM_ROLLOUTS, BATCH, GROUP, NUM_KILLS = 10, 3, 2, 8
LONGEST_S = 60.0


class FoldingTrainer:
    """Its weights are a digest of everything it has trained on, in order; its checkpoints are real folders."""

    def __init__(self, save: str):
        self._save, self.weights = save, b"the beginning"

    def load(self, num_done: int) -> dict:
        """The client_state of a checkpoint."""
        path = find(self._save, num_done)
        self.weights = (Path(path) / "weights").read_bytes()
        return read_client_state(path)["client_state"]

    def put(self, samples: list[TrainSample]) -> list[TrainSample]:
        return samples

    def train(self, step: int, samples: list[TrainSample]) -> StepReport:
        time.sleep(0.02)
        self.weights = folded(self.weights, samples)
        loss = int.from_bytes(self.weights[:4], "big") / 2**32
        return StepReport(
            step=step, num_train_steps=1, num_samples=len(samples), num_tokens=1, metrics={"train/loss": loss}
        )

    def save(self, num_done: int, client_state: dict) -> str:
        record = {"num_rollouts_done": num_done, "client_state": client_state}
        draft = Draft(folder=self._save, number=num_done, record=record, total_limit=2)
        draft.make()
        (Path(draft.path) / "weights").write_bytes(self.weights)
        draft.publish()
        return draft.final_path

    def finish_save(self, *, wait: bool) -> bool:
        return True

    def release_memory(self, keep: tuple[str, ...] = ()) -> None:
        pass


class PausingEngines:
    """Syncs as weight_sync/session.py does, without weights."""

    num_members = 1

    def __init__(self, url: str, pause_mode: str):
        self._client, self._mode = EngineClient(EngineEndpoint(index=0, url=url)), pause_mode

    def sync(self, weights: WeightsRef, trainer: FoldingTrainer, in_use: frozenset[WeightsRef]) -> SyncReceipt:
        self._client.pause_generation(self._mode)
        self._client.update_weight_version(str(weights.version))
        self._client.continue_generation()
        return SyncReceipt(weights=weights, transport="none", num_tensors=1, num_bytes=1, seconds=0.0, digest="d")

    def check_after_failure(self) -> None:
        pass


def folded(weights: bytes, samples: Iterable[TrainSample]) -> bytes:
    digest = hashlib.sha256(weights)
    for sample in samples:
        for array in (sample.tokens, sample.engine_logprobs, sample.weight_versions, sample.advantages):
            digest.update(array.tobytes())
    return digest.digest()


def answer(ids: list[int]) -> tuple[list[int], list[float]]:
    """Four tokens and the end, whatever was said already; by the last token of a prompt, so that groups differ."""
    rest = [40, 41, 42, 43, 299]
    start = next((count for count in range(4, 0, -1) if ids[-count:] == rest[:count]), 0)
    return rest[start:], [-0.5] * (5 - start)


def config_of(folder: Path, asynchrony: AsyncConfig, pause: str | None, rollout: dict) -> RunConfig:
    data = folder / "rows.jsonl"
    if not data.exists():
        data.write_text("".join(f'{{"prompt": "sort {number}", "label": "x"}}\n' for number in range(40)))
    save = folder / "run" / "checkpoints"
    return RunConfig(
        data=DataConfig(
            prompt_data=str(data), input_key="prompt", label_key="label", num_rollout=NUM_ROLLOUTS, rollout_shuffle=True
        ),
        checkpoint=CheckpointConfig(
            hf_checkpoint=str(TINY), save=str(save), load=str(save), save_interval=2, resume="auto"
        ),
        model=ModelConfig(vocab_size=320, max_position_embeddings=64),
        rollout=RolloutConfig(
            rollout_batch_size=BATCH,
            n_samples_per_prompt=GROUP,
            rollout_max_response_len=8,
            dynamic_sampling_filter_path="tests.unit.rollout.user_functions.no_sevens",
            **rollout,
        ),
        reward=RewardConfig(rm_type="exact"),
        sync=SyncConfig(verify_weight_sync="off", update_weight_pause_mode=pause),
        asynchrony=asynchrony,
        observability=ObservabilityConfig(
            run_dir=str(folder / "run"), save_debug_rollout_data=str(folder / "run" / "rollouts" / "{rollout_id}.npz")
        ),
    )


def drive(config: RunConfig, seed: int) -> None:
    """One process of the run, as train.py goes on with it."""
    point = resume.resume_point(config)
    run = RunDirectory.create(config, goes_on=True)
    resume.lock(run)
    num_done = 0 if point is None else point.num_rollouts_done
    ends_only = resume.take_over(run, num_done, NUM_ROLLOUTS)
    chance = random.Random(seed)
    source = check_data(config)
    with ScriptedEngine(
        answer, stop_token_ids=[299], fault_for=lambda body: Fault(delay_s=0.12 * chance.random() ** 3)
    ) as engine:
        endpoint = EngineEndpoint(index=0, url=engine.url)
        access = EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1, endpoints=(endpoint,))
        manager, trainer = RolloutManager(config, access), FoldingTrainer(config.checkpoint.save or "")
        manager.start(source)
        resolved = ResolvedRun(
            config=config, plan=types.SimpleNamespace(), run=run, data=source,
            num_rollout=NUM_ROLLOUTS, ends_only=ends_only,
        )  # fmt: skip
        engines = PausingEngines(engine.url, config.pause_mode)
        job = Job(resolved=resolved, trainer=trainer, engines=engines, rollouts=manager, closing=[manager])
        if point is not None:
            job.num_rollouts_done, job.client_state = num_done, trainer.load(num_done)
        with open(os.devnull, "w") as nowhere:
            sync_loop.run(job, MetricsLog(run, tensorboard=False), ProgressConsole(NUM_ROLLOUTS, nowhere))
        job.close()


def process(work: Callable[[], None]) -> int:
    """`work` in a process of its own; its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - the parent reads the status
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def kill_later(child: int, metrics: Path, num_lines: int, delay_s: float) -> bool:
    """SIGKILL, once so many lines of metrics were written and a moment later; whether it had not ended before."""
    deadline, begun = time.monotonic() + LONGEST_S, count_lines(metrics)
    while count_lines(metrics) < begun + num_lines:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, "it failed by itself"
            return False
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.002)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


MODES = {
    "one-step": ({"async_mode": "one-step"}, None, {}),
    "full": ({"async_mode": "full", "max_staleness": 2}, None, {}),
    "full, abort": ({"async_mode": "full", "max_staleness": 1}, "abort", {}),
    "full, drop": ({"async_mode": "full", "max_staleness": 1, "stale_policy": "drop"}, None, {}),
    "partial": ({"partial_rollout": True}, None, {"over_sampling_batch_size": 5}),
}


@pytest.mark.long_run
@pytest.mark.parametrize("mode", MODES)
def test_killed_anywhere_nothing_is_lost_and_nothing_doubled(tmp_path, mode: str):
    fields, pause, rollout = MODES[mode]
    config, chance = config_of(tmp_path, AsyncConfig(**fields), pause, rollout), random.Random(mode)
    run, killed_at = RunDirectory(str(tmp_path / "run")), []
    while len(killed_at) < NUM_KILLS:
        child = process(lambda: drive(config, len(killed_at)))
        if not kill_later(child, run.metrics, chance.randrange(1, 14), 0.06 * chance.random()):
            break
        killed_at.append(read_json_lines(run.metrics)[-1]["step"])
    else:
        _, status = os.waitpid(process(lambda: drive(config, 1000)), 0)
        assert status == 0
    print(f"{mode}: killed after lines of steps {killed_at}")
    assert len(killed_at) >= 5

    groups = {step: load_rollout(config.observability.save_debug_rollout_data or "", step) for step in range(10)}
    trained = [group.prompt.index for step in range(NUM_ROLLOUTS) for group in groups[step]]
    dropped = [line["prompt"] for line in read_json_lines(run.dropped) if "prompt" in line]
    times = collections.Counter([*trained, *dropped])
    assert max(times.values()) == 1 and len(trained) == NUM_ROLLOUTS * BATCH, "doubled"
    state = read_client_state(find(config.checkpoint.save or "", NUM_ROLLOUTS))["client_state"]["rollout"]["data"]
    waiting = {*map(int, state["open"]), *state["waiting"]}
    assert sorted([*times, *waiting]) == list(range(state["position"])), "lost"
    assert set(trained).isdisjoint(range(3, state["position"], 7)), "the filter"

    weights, losses = b"the beginning", {}
    for step in range(NUM_ROLLOUTS):
        weights = folded(weights, train_samples_of(config, groups[step]))
        losses[step] = int.from_bytes(weights[:4], "big") / 2**32
    assert {
        line["step"]: line["train/loss"] for line in read_json_lines(run.metrics) if line["kind"] == "train"
    } == losses
    for kind in ("rollout", "train", "step"):
        steps = [line["step"] for line in read_json_lines(run.metrics) if line["kind"] == kind]
        assert steps == list(range(NUM_ROLLOUTS)), kind
