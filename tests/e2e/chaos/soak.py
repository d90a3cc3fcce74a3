"""A long run with a random fault every few seconds, beside the same run without: the same in every number but times,
no prompt lost or twice, and no process of either grows.

Both go on at the same time, each with a /dev/shm of its own (which needs root). The soaked one is asked to end
(SIGTERM) when its time is over, the calm one when it has done as many steps.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import signal
import time
from pathlib import Path

from slime_like.job.preemption import STATUS
from slime_like.rollout.debug_data import load_rollout
from tests.e2e import same_runs
from tests.e2e.chaos.growth import SETTLED_S, Lives, files_in
from tests.e2e.chaos.runs import PATIENCE, PLACEMENT, World, deadlines, end, left_by, start
from tests.e2e.chaos.strikes import NobodyThere, RewardServer, Target, small_disk, strike
from tests.e2e.runs import SMALL_RUN, Finished, our_processes

#: From one fault to the next.
EVERY_S = 20.0
#: Faults after which a run is to be as if nothing had been, and goes on meanwhile.
SHORT = [
    ("stall", "reward"), ("kill", "reward"), ("stall", "driver"), ("corrupt reply", "engine"),
    ("slow", "engine"), ("slow", "router"), ("slow", "trainer"), ("slow", "driver"), ("slow", "node"),
]  # fmt: skip
#: Those that somebody must be started anew after: one at a time, when all serve and steps are done.
DEATHS = [("kill", "engine"), ("stall", "engine"), ("kill", "router"), ("kill", "trainer"), ("stall", "trainer")]
SHARE_OF_DEATHS = 0.5  # of faults that come when all serve
#: A silent engine, or trainer rank, is ended after this; more than the longest that a driver is stopped.
HANG_S = 15.0
#: Of what waits for them: longer, also where the driver is stopped meanwhile, so that it is begun again without them,
#: and does not end the run.
DEADLINE_S = 30.0
#: No fault in so many seconds before the end.
LAST_S = 25.0
#: Metrics that tell of faults and of engines, and not of what was trained.
OF_FAULTS = (
    "rollout/failed_requests", "rollout/interrupted_requests", "sync/engines_proven", "sync/probe_logprob_abs_diff",
    "rollout/surplus_groups", "eval/engines",
)  # fmt: skip
PROMPTS_A_STEP = int(SMALL_RUN[SMALL_RUN.index("--rollout-batch-size") + 1])
NUM_ENGINES = 2
#: So little that every step has something to learn, and makes other weights: with 1e-3 all answers are right after 60.
LR = "1e-5"
_LOOK_S = 3.0
_SHM_MB = 2048


class Side:
    """One of the two runs. Its time begins with its first sync."""

    def __init__(self, world: World, name: str, stack: contextlib.ExitStack):
        self.name, self.folder = name, world.next_folder()
        self.run_dir, self._read = self.folder / "run", 0
        self.num_steps = self.num_engines = 0
        self.up_since: float | None = None
        self.shared = stack.enter_context(small_disk(self.folder / "shm", _SHM_MB))
        self.reward = stack.enter_context(RewardServer(self.folder))
        flags = _flags(world, self.folder, self.reward.url)
        own = ["nice", "-n", "5" if name == "calm" else "0"]  # which is ahead anyway
        own += ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(self.shared)]
        self.process = start({"folder": str(self.folder), "blows": []}, flags, self.folder, prefix=own)
        stack.callback(end, self.process)
        self.lives, self._looked = Lives(self.process.pid, self.shared), 0.0

    def look(self) -> bool:
        """Read what is new; whether the run goes on."""
        now = time.monotonic()
        if now - self._looked > 1.0:
            self._looked, since = now, self._looked
            self._follow()
            if self.up_since is not None and int(now / _LOOK_S) != int(since / _LOOK_S):
                self.lives.look()
        return self.process.poll() is None

    def _follow(self) -> None:
        """Count lines of metrics.jsonl; it is written anew when a trainer is restarted."""
        path = self.run_dir / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size < self._read:
                self._read = 0
            with open(path, "rb") as file:
                file.seek(self._read)
                new, _, _ = file.read().rpartition(b"\n")
            self._read += len(new) + bool(new)
            for line in map(_as_json, new.splitlines()):
                if line.get("kind") == "sync":
                    self.up_since, self.num_engines = self.up_since or time.monotonic(), line["sync/engines_proven"]
                elif line.get("kind") == "step":
                    self.num_steps = line["step"] + 1

    def ask_to_end(self) -> None:
        """As a scheduler does."""
        self.process.send_signal(signal.SIGTERM)

    def finished(self) -> Finished:
        """What it has left."""
        return Finished(self.process.returncode, (self.folder / "out").read_text(), self.run_dir)


class Striker:
    """Does random faults to a side."""

    def __init__(self, side: Side, seconds: float, seed: int):
        self._side, self.seconds, self._chance = side, seconds, random.Random(seed)
        self._last = (0.0, 0)  # fault: when, and steps that were done
        self._bags: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        self.done: list[tuple[float, str]] = []
        self.missed: set[str] = set()

    @property
    def all_well(self) -> bool:
        """Whether all engines serve, and steps were done since the last fault."""
        return self._side.num_engines == NUM_ENGINES and self._side.num_steps > self._last[1] + 1

    @property
    def is_over(self) -> bool:
        """Whether the time is over, and the last fault with it."""
        now, up = time.monotonic(), self._side.up_since
        return up is not None and now - up > self.seconds and now - self._last[0] > LAST_S and self.all_well

    def _drawn(self) -> tuple[str, str]:
        """A fault at random; all of a sort come before one of them comes again."""
        deadly = self.all_well and self._chance.random() < SHARE_OF_DEATHS
        if not self._bags[deadly]:
            self._bags[deadly] = self._chance.sample(DEATHS if deadly else SHORT, len(DEATHS if deadly else SHORT))
        return self._bags[deadly].pop()

    def maybe_strike(self) -> None:
        """Once every EVERY_S."""
        now, side = time.monotonic(), self._side
        if side.up_since is None or now - max(side.up_since, self._last[0]) < EVERY_S:
            return
        if now - side.up_since > self.seconds - LAST_S:
            return
        fault, whom = self._drawn()
        target = Target(side.process.pid, int((side.run_dir / ".lock").read_text()), side.reward, side.folder, {})
        name = f"{fault} {whom}"
        try:
            strike(target, fault, whom)
        except NobodyThere:  # it is just being started anew: something else, at once
            self.missed.add(name)
            return
        self._last = (now, side.num_steps)
        self.done.append((now - side.up_since, name))
        print(f"{now - side.up_since:6.0f} s, step {side.num_steps}: {name}", flush=True)


def soak(world: World, seconds: float, *, seed: int = 0) -> int:
    """Run both; 1 if anything differs, grows or is left."""
    before, problems = our_processes(), []
    with contextlib.ExitStack() as stack:
        soaked, calm = Side(world, "soaked", stack), Side(world, "calm", stack)
        striker = Striker(soaked, seconds, seed)
        problems += _watched(soaked, calm, striker)
        print(f"soaked: {soaked.num_steps} steps, calm: {calm.num_steps} steps; {len(striker.done)} faults")
        for fault, count in sorted(collections.Counter(name for _, name in striker.done).items()):
            print(f"  {count:3} x {fault}")
        problems += [f"{name}: nobody was ever there" for name in striker.missed - {name for _, name in striker.done}]
        problems += _compared(calm, soaked) if not problems else []
        for side in (soaked, calm):
            problems += _grown(side)
            problems += [left] if (left := left_by(before)) else []
            problems += [f"{side.name} left {path}" for path in files_in(side.shared)]
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


def _flags(world: World, folder: Path, reward_url: str) -> list:
    """Of both runs; more rollouts than they will ever do."""
    run_dir, flags = folder / "run", list(SMALL_RUN)
    at = flags.index("--custom-rm-path")
    flags[at : at + 2] = ["--rm-type", "remote_rm", "--rm-url", reward_url]
    flags[flags.index("--num-rollout") + 1] = "100000"
    flags[flags.index("--lr") + 1] = LR
    return [
        *flags, *deadlines(DEADLINE_S * PATIENCE), *PLACEMENT, "--deterministic", "--max-engine-restarts", "1000",
        "--max-router-restarts", "1000", "--max-trainer-restarts", "1000", "--rm-retries", "50",
        "--engine-hang-timeout-s", f"{HANG_S * PATIENCE:g}", "--trainer-hang-timeout-s", f"{HANG_S * PATIENCE:g}",
        "--hf-checkpoint", world.model, "--prompt-data", world.data / "train.jsonl",
        "--eval-prompt-data", "sort", f"{world.data / 'eval.jsonl'}@[0:4]", "--eval-interval", "5",
        "--save", folder / "checkpoints", "--save-interval", "5", "--save-total-limit", "2",
        "--run-dir", run_dir, *same_runs.flags(run_dir),
    ]  # fmt: skip


def _watched(soaked: Side, calm: Side, striker: Striker) -> list[str]:
    """Strike and look until both have ended; what is wrong with how they did."""
    asked: set[str] = set()
    hangs = time.monotonic() + (600 + 3 * striker.seconds) * PATIENCE
    while soaked.look() | calm.look():
        if time.monotonic() > hangs:
            return [f"{side.name} does not end" for side in (soaked, calm) if side.process.poll() is None]
        if soaked.process.poll() is None:
            striker.maybe_strike()
            if striker.is_over and "soaked" not in asked:
                asked.add("soaked")
                soaked.ask_to_end()
        elif calm.num_steps >= soaked.num_steps and "calm" not in asked:
            asked.add("calm")
            calm.ask_to_end()
        time.sleep(0.1)
    return [
        f"{side.name}: status {side.process.returncode}, asked: {side.name in asked}: {side.finished().output[-1500:]}"
        for side in (soaked, calm)
        if side.process.returncode != STATUS or side.name not in asked
    ]


def _compared(calm: Side, soaked: Side) -> list[str]:
    """What of the steps that both have done is not the same."""
    last = min(soaked.num_steps, calm.num_steps)
    try:
        count = same_runs.assert_same(calm.finished(), soaked.finished(), without=OF_FAULTS, until=last)
    except AssertionError as error:
        return [f"they differ: {error}"]
    digests = [line["sync/digest"] for line in soaked.finished().metrics("sync") if line["step"] <= last]
    if len(set(digests)) < len(digests):
        return [f"of {len(digests)} versions of the weights only {len(set(digests))} differ: nothing to compare"]
    print(f"{last} steps: {count} numbers and every token are equal, {len(digests)} digests of weights among them")
    prompts = [
        group.prompt.index
        for step in range(last)
        for group in load_rollout(str(soaked.run_dir / "rollouts" / f"{step}.npz"), step)
    ]
    if sorted(prompts) != list(range(PROMPTS_A_STEP * last)):
        return [f"{len(prompts)} prompts, {len(set(prompts))} different, from {min(prompts)} to {max(prompts)}"]
    print(f"{len(prompts)} prompts, each of the data's order once")
    return []


def _grown(side: Side) -> list[str]:
    """Print what became of each process; names of those that grow."""
    print(f"\n{side.name:36} {'seconds':>7} {'MB':>7} {'more MB':>8} {'shared':>7} {'files':>6}")
    problems = []
    looks = [(life.name, life.counts_from, life.samples) for life in side.lives]
    (side.folder / "lives.json").write_text(json.dumps(looks))
    for life in side.lives:
        if (more := life.growth()) is not None:
            is_short = " (short: not judged)" if more.seconds < SETTLED_S else ""
            sizes = f"{more.resident / 1e6:7.0f} {more.more_resident / 1e6:8.1f} {more.more_shared / 1e6:7.1f}"
            said = "  GROWS" if more.is_too_much else is_short
            print(f"{life.name[:36]:36} {more.seconds:7.0f} {sizes} {more.more_files:6.0f}{said}")
            problems += [f"{side.name}: {life.name} grows"] if more.is_too_much else []
    return problems


def _as_json(line: bytes) -> dict:
    try:
        return json.loads(line)
    except ValueError:  # just being written anew
        return {}
