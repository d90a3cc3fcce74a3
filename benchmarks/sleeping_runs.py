"""Runs whose engine and trainer sleep: the rollout side and the loop are real, on the scripted engine.

Tokens, train steps and syncs take their time as sleep, so what is measured is no neighbour's load, and both sides can
work at once on any host.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import json
import os
import threading
import time
from pathlib import Path

import numpy as np

from slime_like.planning.simulate.spread import Spread

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SleepCase:
    """A run whose engine and trainer sleep.

    slots: answers that the engine works on at a time, the others wait in their order; None: all of them. flags: more
    of train.py's, without their dashes.
    """

    name: str
    batch: int
    lengths: Spread
    token_s: float = 0.01
    train_fixed_s: float = 0.2
    train_token_s: float = 1e-4
    sync_s: float = 0.1
    steps: int = 17
    slots: int | None = None
    mode: str = "off"
    flags: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> str:
        """Its run directory's name."""
        name = self.name if self.mode == "off" else f"{self.name}-{self.mode}"
        return "-".join([name, *(f"{flag}-{value}" for flag, value in self.flags)])


class SleepingScript:
    """What the scripted engine answers, and when: a length for each request, a token after each token_s.

    Of several requests with one prompt, which an answer cannot tell apart, the first to end is the shortest.
    """

    def __init__(self, case: SleepCase, seed: int):
        self._case, self._random, self._lock = case, np.random.default_rng(seed), threading.Lock()
        #: prompt -> (end, tokens) of what is being answered to it
        self._answers: dict[tuple[int, ...], list[tuple[float, int]]] = collections.defaultdict(list)
        self._ends: list[float] = []  # of the slots that are taken

    def delay(self, body: dict):
        """For ScriptedEngine(fault_for=…)."""
        from slime_like.testing.scripted_engine import Fault

        now = time.monotonic()
        with self._lock:
            length = max(1, round(float(self._case.lengths.draw(self._random, (1,))[0])))
            is_full = self._case.slots is not None and len(self._ends) >= self._case.slots
            begin = max(now, heapq.heappop(self._ends)) if is_full else now
            end = begin + length * self._case.token_s
            heapq.heappush(self._ends, end)
            heapq.heappush(self._answers[tuple(body["input_ids"])], (end, length))
        return Fault(delay_s=end - now)

    def answer(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """For ScriptedEngine(script)."""
        with self._lock:
            _, length = heapq.heappop(self._answers[tuple(prompt)])
        return [5] * length, [-1.0] * length


class SleepingTrainer:
    """A Trainer whose step is a sleep by tokens."""

    def __init__(self, case: SleepCase):
        self._case = case

    def put(self, samples):
        """The samples themselves."""
        return samples

    def train(self, step, batch):
        """Sleeps."""
        from slime_like.records import StepReport

        tokens = sum(len(sample.tokens) for sample in batch)
        time.sleep(self._case.train_fixed_s + self._case.train_token_s * tokens)
        return StepReport(step=step, num_train_steps=1, num_samples=len(batch), num_tokens=tokens, metrics={})


class SleepingEngines:
    """Engines whose sync is a sleep."""

    num_members = 1

    def __init__(self, case: SleepCase):
        self._case = case

    def sync(self, weights, trainer, in_use=frozenset()):
        """Sleeps."""
        from slime_like.records import SyncReceipt

        time.sleep(self._case.sync_s)
        return SyncReceipt(
            weights=weights, transport="sleep", num_tensors=0, num_bytes=0, seconds=self._case.sync_s, digest=""
        )

    def check_after_failure(self) -> None:
        """Nothing dies."""


def sleep_run(case: SleepCase, folder: Path) -> Path:
    """Run the loop on sleeps; its run directory."""
    from slime_like.job.running import Job, ResolvedRun
    from slime_like.loops import sync_loop
    from slime_like.observability.console import ProgressConsole
    from slime_like.observability.metrics import MetricsLog
    from slime_like.planning.report.render import as_json, make_report
    from slime_like.rollout.check_data import check_data
    from slime_like.rollout.manager import RolloutManager
    from slime_like.rollout.service import EngineAccess
    from slime_like.testing.scripted_engine import ScriptedEngine
    from slime_like.utils.files import RunDirectory, write_atomic

    config = _sleep_config(case, folder)
    report, script = make_report(config, planning=False), SleepingScript(case, seed=0)
    run, source = RunDirectory.create(config), check_data(config)
    write_atomic(run.plan, as_json(report))
    resolved = ResolvedRun(config=config, plan=report.plan, run=run, data=source, num_rollout=case.steps)
    with ScriptedEngine(script.answer, fault_for=script.delay) as engine, open(os.devnull, "w") as nowhere:
        manager = RolloutManager(config, EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1))
        manager.start(source)
        try:
            job = Job(resolved=resolved, trainer=SleepingTrainer(case), engines=SleepingEngines(case), rollouts=manager)  # type: ignore[arg-type]
            with MetricsLog(run, tensorboard=False) as log:
                sync_loop.run(job, log, ProgressConsole(case.steps, nowhere))
        finally:
            manager.close()
    return Path(run.path)


def _sleep_config(case: SleepCase, folder: Path):
    from arguments import parse_args

    rows = [{"prompt": [{"role": "user", "content": f"sort {n:04d}"}], "label": str(n)} for n in range(400)]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = str(ROOT / "models" / "tiny-qwen3")
    flags = {
        "hf-checkpoint": model, "prompt-data": str(data), "input-key": "prompt", "label-key": "label",
        "num-rollout": case.steps, "rollout-batch-size": case.batch, "n-samples-per-prompt": 2,
        "rollout-max-response-len": 400, "rm-type": "exact", "log-samples": 1000, "verify-weight-sync-interval": 0,
        "actor-num-gpus-per-node": 1, "rollout-num-gpus": 1, "run-dir": str(folder / case.folder),
    }  # fmt: skip
    if case.mode != "off":
        flags["async-mode"] = case.mode
    flags |= dict(case.flags)
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse_args([*argv, "--apply-chat-template"]).config
