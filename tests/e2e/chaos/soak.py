"""A long run with a random fault every few seconds, against the same run without: the same in every number but times,
and no process of it grows.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import time
from pathlib import Path

import psutil

from tests.e2e import same_runs
from tests.e2e.chaos.runs import PLACEMENT, World, deadlines, end, left_by, start
from tests.e2e.chaos.strikes import NobodyThere, RewardServer, Target, strike
from tests.e2e.runs import SMALL_RUN, Finished, our_processes

#: From one fault to the next, and from the death of an engine to that of another: its successor comes up meanwhile.
EVERY_S, DEATH_EVERY_S = 20.0, 60.0
#: Of a run without faults on two cores that do nothing else; how many steps a soak has follows from it.
STEP_S = 2.0
#: Faults after which a run is to be as if nothing had been.
FAULTS = [
    ("kill", "engine"), ("stall", "reward"), ("stall", "driver"), ("corrupt reply", "engine"),
    ("slow", "engine"), ("slow", "router"), ("slow", "trainer"), ("slow", "driver"), ("slow", "node"),
]  # fmt: skip
#: Metrics that tell of faults and of engines, and not of what was trained.
OF_FAULTS = (
    "rollout/failed_requests", "rollout/interrupted_requests", "sync/engines_proven", "sync/probe_logprob_abs_diff",
    "rollout/surplus_groups",
)  # fmt: skip
#: What a process may grow by, from the second quarter of its time to the last: of its memory, and files.
GROWTH, MORE_BYTES, MORE_FILES = 0.10, 24 << 20, 12
_SAMPLE_S = 2.0


@dataclasses.dataclass
class Life:
    """A process over its time. samples: (seconds, resident bytes, of them shared, open files)."""

    name: str
    samples: list[tuple[float, int, int, int]] = dataclasses.field(default_factory=list)

    def growth(self) -> tuple[float, float, float, float] | None:
        """(resident bytes, shared bytes, files) in the last quarter less those in the second; and the bytes there."""
        quarter = len(self.samples) // 4
        if quarter < 3:
            return None
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        median = [[statistics.median(row[column] for row in part) for column in (1, 2, 3)] for part in (early, late)]
        more = [late - early for early, late in zip(*median, strict=True)]
        return more[0], more[1], more[2], median[0][0]

    def grows(self) -> bool:
        """Whether it does not stay flat."""
        more = self.growth()
        if more is None:
            return False
        return max(more[:2]) > GROWTH * more[3] + MORE_BYTES or more[2] > MORE_FILES


def soak(world: World, seconds: float, *, seed: int = 0) -> int:
    """Run both; 1 if anything differs, grows or is left."""
    num_rollout = max(8, round(seconds / STEP_S / 2))  # with faults, and watched, it takes about twice as long
    before, problems = our_processes(), []
    calm, calm_seconds, _, _ = _run(world, num_rollout, None)
    print(f"without faults: {num_rollout} rollouts in {calm_seconds:.0f} s, status {calm.returncode}", flush=True)
    soaked, soaked_seconds, faults, lives = _run(world, num_rollout, random.Random(seed))
    print(f"with {len(faults)} faults: {soaked_seconds:.0f} s, status {soaked.returncode}")
    for fault in sorted(set(faults)):
        print(f"  {faults.count(fault):3} x {fault}")
    for run in (calm, soaked):
        if run.returncode:
            problems.append(f"status {run.returncode}: {run.output[-800:]}")
    if not problems:
        try:
            print(f"{same_runs.assert_same(calm, soaked, without=OF_FAULTS)} numbers, and every token, are equal")
        except AssertionError as error:
            problems.append(f"they differ: {error}")
    print(f"{'process':28} {'samples':>7} {'MB':>7} {'more MB':>8} {'shared':>7} {'files':>6}")
    for life in sorted(lives, key=lambda life: -len(life.samples)):
        if (more := life.growth()) is not None:
            sizes = f"{more[3] / 1e6:7.0f} {more[0] / 1e6:8.1f} {more[1] / 1e6:7.1f} {more[2]:6.0f}"
            print(f"{life.name[:28]:28} {len(life.samples):7} {sizes}{'  GROWS' if life.grows() else ''}")
        problems += [f"{life.name} grows"] if life.grows() else []
    problems += [left] if (left := left_by(before)) else []
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


def _run(world: World, num_rollout: int, chance: random.Random | None):
    """(the run, its seconds, the faults that it had, its processes); chance: None for no faults."""
    folder = world.next_folder()
    run_dir = folder / "run"
    flags = list(SMALL_RUN)
    at = flags.index("--custom-rm-path")
    flags[flags.index("--num-rollout") + 1] = str(num_rollout)
    with RewardServer(folder) as reward:
        flags[at : at + 2] = ["--rm-type", "remote_rm", "--rm-url", reward.url]
        flags += [
            *deadlines(), *PLACEMENT, "--deterministic", "--max-engine-restarts", "1000",
            "--hf-checkpoint", world.model, "--prompt-data", world.data / "train.jsonl",
            "--eval-prompt-data", "sort", f"{world.data / 'eval.jsonl'}@[0:4]", "--eval-interval", "5",
            "--save", folder / "checkpoints", "--save-interval", "5", "--save-total-limit", "2",
            "--run-dir", run_dir, *same_runs.flags(run_dir),
        ]  # fmt: skip
        process = start({"folder": str(folder), "blows": []}, flags, folder)
        started = time.monotonic()
        try:
            faults, lives = _watched(process, run_dir, folder, reward, chance)
        finally:
            end(process)
    run = Finished(process.returncode, (folder / "out").read_text(), run_dir)
    return run, time.monotonic() - started, faults, list(lives.values())


def _watched(process, run_dir: Path, folder: Path, reward: RewardServer, chance: random.Random | None):
    """Strike and look until the run ends."""
    faults: list[str] = []
    lives: dict[int, Life] = {}
    last_fault = last_death = last_look = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        is_up = (run_dir / "metrics.jsonl").exists() and '"kind": "sync"' in (run_dir / "metrics.jsonl").read_text()
        if not is_up:
            last_fault = now
        elif chance is not None and now - last_fault > EVERY_S:
            fault, whom = chance.choice(FAULTS)
            if (fault, whom) != ("kill", "engine") or now - last_death > DEATH_EVERY_S or not faults:
                last_fault, last_death = now, now if whom == "engine" and fault == "kill" else last_death
                target = Target(process.pid, int((run_dir / ".lock").read_text()), reward, folder, {})
                try:
                    strike(target, fault, whom)
                    faults.append(f"{fault} {whom}")
                except NobodyThere:
                    faults.append(f"{fault} {whom}: nobody there")
        if is_up and now - last_look > _SAMPLE_S:
            last_look = now
            _look(process.pid, lives, now)
        time.sleep(0.1)
    return faults, lives


def _look(supervisor: int, lives: dict[int, Life], now: float) -> None:
    """One sample of every process of the run."""
    try:
        family = psutil.Process(supervisor).children(recursive=True)
    except psutil.Error:
        return
    for process in family:
        try:
            name = " ".join(process.cmdline()[:1])
            memory, files = process.memory_info(), process.num_fds()
            life = lives.setdefault(process.pid, Life(f"{os.path.basename(name)} {process.pid}"))
            life.samples.append((now, memory.rss, memory.shared, files))
        except psutil.Error:
            continue
