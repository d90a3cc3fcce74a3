"""Runs with faults, and what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from slime_like import errors
from slime_like.observability.doctor.__main__ import diagnose
from slime_like.observability.doctor.verdict import as_text
from slime_like.rollout.debug_data import load_rollout
from slime_like.sglang_backend.client import EngineHttpError
from tests.e2e.chaos.cells import Cell
from tests.e2e.chaos.strikes import STALL_S, NobodyThere, RewardServer, ScriptedServers, Target, small_disk, strike
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes
from tests.e2e.syncs import buckets_left

#: On a host that does much else, or is slow, everything may take so many times as long.
PATIENCE = float(os.environ.get("CHAOS_PATIENCE", "1"))
#: From a fault to the end of a run that it ends; the flags below leave that room. And until all is ended.
LIMIT_S, CLOSE_S = 30.0 * PATIENCE, 25.0 * PATIENCE
#: From the last fault to the end of a run that outlives it: then it hangs.
OUTLIVE_S = 240.0 * PATIENCE
#: Of a start with a fault in it.
START_S = 90.0 * PATIENCE
_NAMES = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
_NAMES.append(EngineHttpError.__name__)
_ERROR = re.compile(rf"^({'|'.join(_NAMES)}):\s+(.*)", re.MULTILINE)
_TRACEBACK = re.compile(r"^Traceback", re.MULTILINE)


def deadlines(longest_s: float = 20.0) -> list[str]:
    """Of everything that waits, so that LIMIT_S can hold; the tiny model takes a second for any of it, and few more on
    a busy host.
    """
    seconds = {"train": longest_s, "update-weight": longest_s, "rollout-request": longest_s, "reward": 0.75 * longest_s}
    flags = [part for name, most in seconds.items() for part in (f"--{name}-timeout-s", f"{most:g}")]
    return [*flags, "--engine-start-timeout-s", f"{START_S:g}"]


PLACEMENT = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "1"]
ONE_ENGINE = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"]
#: Two ranks, so that one waits for the other; one engine.
TWO_RANKS = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"]
MODES = {"sync": [], "async": ["--async-mode", "full", "--max-staleness", "2"]}
OUTLIVES = ["--max-engine-restarts", "100", "--max-router-restarts", "100"]
#: Silence of an engine, a router or a trainer rank that was stopped: the shortest deadline.
HANG_S = 8.0
#: Of the deadlines of a run whose only fault is that somebody stops for good: they are all that is waited for.
STALLED_S = 12.0
#: A part that is to be struck while it starts is waited for.
COMES_S = 60.0
#: Steps that an engine's successor may take to come: an engine is struck when all serve.
STEPS_OF_A_DEATH = 6


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a fault. what: recovered, ended, or what is wrong: HANGS, NAMELESS, LATE, WRONG, not struck."""

    cell: Cell
    what: str
    seconds: float  # from the fault to the run's end; of one that went on: 0
    error: str = ""
    remark: str = ""
    light: bool = False  # on scripted engines
    host: str = ""

    @property
    def is_good(self) -> bool:
        """Recovered, or ended by name in time."""
        return self.what in ("recovered", "ended")


#: Of a cell whose run went on, and ended by a later fault.
OUTLIVED = "outlived"
#: Outcomes that say nothing of a cell yet.
OPEN = ("not struck", OUTLIVED)


@dataclasses.dataclass
class World:
    """Model, data, and a folder for runs."""

    folder: Path
    model: Path
    data: Path
    num_runs: int = 0

    def next_folder(self) -> Path:
        """For one run."""
        self.num_runs += 1
        while (folder := self.folder / f"{self.num_runs:03d}").exists():  # of an earlier call
            self.num_runs += 1
        folder.mkdir(parents=True)
        return folder


@contextlib.contextmanager
def disks(cells: Sequence[Cell], folder: Path):
    """Part -> its folder, on a file system of its own if it is to be full; else just a folder."""
    sizes = {"driver": 200, "trainer": 200, "node": 600}
    full = {cell.whom for cell in cells if cell.fault == "full disk"}
    with contextlib.ExitStack() as stack:
        folders = {}
        for whom, size in sizes.items():
            path = folder / whom[0]
            if whom in full:
                stack.enter_context(small_disk(path, size))
            else:
                path.mkdir()
            folders[whom] = path
        yield folders


def flags_for(cells: Sequence[Cell], *, is_scripted: bool) -> list[str]:
    """Placement, deadlines, and what outlives faults, as these cells need it."""
    first, alone = cells[0], len(cells) == 1
    placement = PLACEMENT
    if first.whom == "trainer" and first.fault in ("kill", "stall"):
        placement = TWO_RANKS
    elif alone and first.whom not in ("engine", "router"):
        placement = ONE_ENGINE
    stalls = alone and first.fault == "stall" and first.whom not in STALL_S
    flags = [*([] if is_scripted else placement), *(deadlines(STALLED_S) if stalls else deadlines()), *OUTLIVES]
    if any(cell.fault == "stall" for cell in cells):
        flags += ["--engine-hang-timeout-s", f"{HANG_S:g}", "--trainer-hang-timeout-s", f"{HANG_S:g}"]
    if not alone and first.whom == "trainer" and first.fault in ("kill", "stall"):
        flags += ["--max-trainer-restarts", "100"]
    return flags


def command(
    world: World,
    cells: Sequence[Cell],
    num_rollout: int,
    places: dict[str, Path],
    reward_url: str,
    servers: ScriptedServers | None = None,
) -> list:
    """Flags of train.py. servers: scripted engines in place of SGLang's."""
    flags = list(SMALL_RUN)
    at = flags.index("--custom-rm-path")
    flags[at : at + 2] = ["--rm-type", "remote_rm", "--rm-url", reward_url]
    flags[flags.index("--num-rollout") + 1] = str(num_rollout)
    run_dir = places["driver"] / "run"
    by_disk = any((cell.whom, cell.fault, cell.phase) == ("trainer", "full disk", "sync") for cell in cells)
    disk_flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", places["trainer"] / "w"]
    flags += flags_for(cells, is_scripted=servers is not None)
    if servers is not None:
        flags += ["--actor-num-gpus-per-node", "2", "--rollout-external", "--verify-weight-sync", "off"]
        flags += ["--rollout-external-engine-addrs", *servers.urls]
    return [
        *flags, *MODES[cells[0].mode], *(disk_flags if by_disk else []),
        "--hf-checkpoint", world.model, "--prompt-data", f"{world.data / 'train.jsonl'}@[0:800]",
        "--eval-prompt-data", "sort", f"{world.data / 'eval.jsonl'}@[0:4]", "--eval-interval", "1",
        "--save", places["trainer"] / "checkpoints", "--save-interval", "1", "--save-total-limit", "2",
        "--run-dir", run_dir,
        "--save-debug-rollout-data", run_dir.parent / "rollouts" / "{rollout_id}.npz",
    ]  # fmt: skip


def blows_of(cells: Sequence[Cell], first_step: int = 1) -> tuple[list[dict], int]:
    """What the run is told of its faults, and how many rollouts it takes."""
    blows, step = [], first_step
    for number, cell in enumerate(cells):
        phase = "eval rewards" if (cell.whom, cell.phase) == ("reward", "eval") else cell.phase
        at = 0 if phase == "start" else step
        blows.append({"number": number, "phase": phase, "step": at, "fault": cell.fault, "whom": cell.whom})
        step += STEPS_OF_A_DEATH if cell.whom == "engine" and cell.fault in ("kill", "stall") and len(cells) > 1 else 1
    # What is generated ahead comes before its step: of the last steps nothing is left to be struck.
    return blows, step + (3 if cells[0].mode == "async" else 1)


def sync_fault(cell: Cell, folder: Path) -> dict | None:
    """The order of tests/e2e/faulty_train.py for weights that are changed on their way."""
    if (cell.fault, cell.phase) != ("corrupt reply", "sync"):
        return None
    what = (
        {"kind": "flipped", "names": ["model.layers.1.mlp.down_proj.weight"]} if cell.whom == "trainer" else "version"
    )
    return {"version": 3, "rank": 0, "mark": str(folder / "struck-0"), "what": what}


class ChaosRun:
    """One run, and whoever strikes it. light: on scripted engines, without Ray, Megatron and SGLang (light.py)."""

    def __init__(self, world: World, cells: Sequence[Cell], *, light: bool = False):
        self.world, self.cells, self.folder = world, list(cells), world.next_folder()
        self.script, self.servers = ("light.py", ScriptedServers()) if light else ("announcing.py", None)
        self.struck: dict[int, float] = {}  # number of a cell -> when
        self.hangs_after_s = OUTLIVE_S if len(self.cells) > 1 else START_S + LIMIT_S

    def outcomes(self) -> list[Outcome]:
        """Run it to its end, and judge."""
        before, (blows, num_rollout) = our_processes(), blows_of(self.cells)
        order = {"folder": str(self.folder), "blows": blows}
        if fault := sync_fault(self.cells[0], self.folder):
            blows = []
            order |= {"sync_fault": fault, "blows": blows}
        with (
            disks(self.cells, self.folder) as places,
            RewardServer(self.folder) as reward,
            self.servers or contextlib.nullcontext(),
        ):
            flags = command(self.world, self.cells, num_rollout, places, reward.url, self.servers)
            extra = {"RAY_TMPDIR": str(places["node"])} if any(one.whom == "node" for one in self.cells) else {}
            process = start(order, flags, self.folder, script=self.script, **extra)
            try:
                hung = self._serve(process, blows, reward, places)
            finally:
                end(process)
            run = Finished(process.returncode, (self.folder / "out").read_text(), places["driver"] / "run")
            return self._judged(run, num_rollout, hung, left_by(before))

    def _serve(self, process: subprocess.Popen, blows: list[dict], reward: RewardServer, places: dict) -> str:
        """Strike when it is time, until the run has ended; what the doctor says of one that hangs."""
        started = time.monotonic()
        waiting = [blow["number"] for blow in blows]
        while process.poll() is None:
            now = time.time()
            if waiting and (due := self.folder / f"due-{waiting[0]}").exists():
                number, blow = waiting[0], json.loads(due.read_text())
                target = Target(process.pid, blow["driver"], reward, self.folder, places, self.servers)
                try:
                    strike(target, blow["fault"], blow["whom"])
                    self.struck[number] = now
                except NobodyThere:
                    if blow["phase"] == "start" and now - blow["time"] < COMES_S:
                        time.sleep(0.1)
                        continue
                waiting.pop(0)
                (self.folder / f"struck-{number}").touch()
            if not blows and not self.struck and (mark := self.folder / "struck-0").exists():
                self.struck[0] = mark.stat().st_mtime
            since = now - max(self.struck.values()) if self.struck else time.monotonic() - started
            if since > self.hangs_after_s:
                verdict, num_rollout = diagnose(str(places["driver"] / "run"))
                return as_text(verdict, str(places["driver"] / "run"), num_rollout)
            time.sleep(0.005)
        self.ended = time.time()
        return ""

    def _judged(self, run: Finished, num_rollout: int, hung: str, left: str) -> list[Outcome]:
        (self.folder / "doctor").write_text(hung)
        whole = run.returncode == 0 and not hung
        if whole:
            proves = self.servers is None  # scripted engines have no weights
            error = wrong(run, self.folder, num_rollout, self.cells[0].mode, proves=proves) or left
            last = len(self.cells)
            what = "WRONG" if error else "recovered"
        else:
            last = max(self.struck, default=-1)
            what, error = ended_how(run.output, hung)
            what, error = ("WRONG", left) if left and what == "ended" else (what, error)
        outcomes = []
        for number, cell in enumerate(self.cells):
            late = (self.folder / f"late-{number}").exists()
            remark = "struck when the phase was over" if late else ""
            if number not in self.struck:
                outcomes.append(Outcome(cell, "not struck", 0.0, "" if number else error, remark))
            elif whole:
                outcomes.append(Outcome(cell, what, 0.0, error))
            elif number < last:  # it went on to the next fault; what it did in all was not judged, since it did not end
                outcomes.append(Outcome(cell, OUTLIVED, 0.0))
            else:
                seconds = self.ended - self.struck[number] if not hung else self.hangs_after_s
                most = (START_S if cell.phase == "start" else LIMIT_S) + CLOSE_S
                what = "LATE" if what == "ended" and seconds > most else what
                outcomes.append(Outcome(cell, what, round(seconds, 1), error[:300], remark))
        return [dataclasses.replace(one, light=self.servers is not None, host=this_host()) for one in outcomes]


def this_host() -> str:
    """Hardware that a run had, and may have shared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{os.cpu_count()} cores ({models[0] if models else 'unknown'}), no GPU; deadlines of ends times {PATIENCE:g}"
    )


def start(
    order: dict, flags: Sequence, folder: Path, *, script: str = "announcing.py", prefix: Sequence = (), **extra: str
) -> subprocess.Popen:
    """announcing.py with an order, in the background; what it says goes to `out`. prefix: a command that becomes it."""
    line = [*prefix, sys.executable, ROOT / "tests/e2e/chaos" / script, json.dumps(order), *flags]
    with open(folder / "out", "w") as output:
        return subprocess.Popen(
            list(map(str, line)), cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), **extra), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen) -> None:
    """Whatever is left of a run, stopped processes too."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGCONT)
                one.kill()


def ended_how(output: str, hung: str) -> tuple[str, str]:
    """(what, the error's first line) of a run that did not outlive its fault."""
    if hung:
        return "HANGS", hung.splitlines()[1].strip() if "\n" in hung else hung
    said = output.partition("started in")[2] or output
    named = _ERROR.findall(said)
    if not named or _TRACEBACK.search(said):
        traceback = "a traceback, " if _TRACEBACK.search(said) else ""
        return "NAMELESS", traceback + (said.strip().splitlines() or ["nothing was said"])[-1]
    name, text = named[-1]
    return "ended", f"{name}: {text}"


def left_by(before: dict[int, str]) -> str:
    """Processes and shared memory that a run has left behind."""
    try:
        assert_nothing_left(before, seconds=20)
    except AssertionError as error:
        for pid in set(our_processes()) - set(before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return str(error)
    return ", ".join(buckets_left())


def wrong(run: Finished, folder: Path, num_rollout: int, mode: str, *, proves: bool = True) -> str:
    """What is wrong with what a run that ended well did: its accounting, or the weights that it was trained with."""
    steps = list(range(num_rollout))
    # Of a full disk the run has said that lines are missing: those that there are must be right.
    lost = "metrics.jsonl: No space left" in run.output
    # A step whose trainer was lost behind its save is not done again: of it there are no times.
    untimed = {int(done) - 1 for done in re.findall(r"anew from the checkpoint after (\d+) rollouts", run.output)}
    for kind in ("rollout", "train", "step"):
        done = [line["step"] for line in run.metrics(kind)]
        expected = steps[: len(done)] if lost else steps
        if sorted({*done, *(untimed if kind == "step" else ())}) != expected or len(done) != len(set(done)):
            return f"{kind} lines of steps {done}, not of 0 to {num_rollout - 1}"
    done = [line["step"] for line in run.metrics("eval")]
    if done != (list(range(len(done))) if lost else list(range(num_rollout + 1))[-len(done) :]):
        return f"evaluations after {done}"
    syncs = run.metrics("sync")
    num_syncs = len(syncs) if lost else num_rollout + 1
    if (versions := [line["sync/version"] for line in syncs]) != list(range(1, num_syncs + 1)):
        return f"weight versions {versions}"
    if proves and any(line["sync/engines_proven"] < 1 for line in syncs):
        return "a sync proved nothing"
    difference = max((line.get("train/logprob_abs_diff_max", 0.0) for line in run.metrics("train")), default=0.0)
    if mode == "sync" and difference > 1e-4:
        return f"trained on answers of other weights: log-probs differ by {difference:.2g}"
    if (
        mode == "async"
        and (stale := max((line["async/staleness_max"] for line in run.metrics("rollout")), default=0)) > 2
    ):
        return f"trained on answers that were {stale} versions old"
    prompts: list[int] = []
    steps = [step for step in steps if not lost or (folder / "d" / "rollouts" / f"{step}.npz").exists()]
    for step in steps:
        groups = load_rollout(str(folder / "d" / "rollouts" / f"{step}.npz"), step)
        prompts += [group.prompt.index for group in groups]
        oldest = {int(v) for g in groups for sample in g.samples for v in sample.weight_versions if v >= 0}
        if mode == "sync" and oldest - {step + 1}:
            return f"rollout {step} was made by weight versions {sorted(oldest)}"
    if len(prompts) != 4 * len(steps) or len(set(prompts)) != len(prompts):
        return f"{len(prompts)} prompts were trained on, {len(set(prompts))} different ones, not {4 * len(steps)}"
    return ""
