"""One rung of the check: a process with a deadline, and what came of it. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

PASSED, FAILED, TIMED_OUT, SKIPPED, PRETENDED = "passed", "failed", "timed out", "skipped", "passed, pretended"
#: How much of a log a report shows of a rung that did not pass.
LOG_TAIL_LINES = 25
#: How long a rung's processes may take to leave after SIGTERM: train.py ends its run by itself in that time.
LEAVE_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder; `name` is also the function of rungs.py that does it."""

    name: str
    title: str
    deadline_s: float
    min_gpus: int = 1  # on a CUDA host; a pretended one has as many as are asked for
    needs: tuple[str, ...] = ()  # rungs without which this one tells nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One number against its limit. Example: Check("log-prob difference", 0.004, "<=", 0.02).ok"""

    what: str
    value: float
    sign: str  # "<=" or ">="
    limit: float

    @property
    def ok(self) -> bool:
        """NaN is never within a limit."""
        return self.value <= self.limit if self.sign == "<=" else self.value >= self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rung says. `where`: "cuda", "the CPU", or "a pretended device"."""

    name: str
    title: str
    verdict: str
    summary: str
    seconds: float = 0.0
    where: str = ""
    numbers: dict = dataclasses.field(default_factory=dict)
    checks: list[dict] = dataclasses.field(default_factory=list)
    log: str = ""  # file
    log_tail: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether somebody has to look at it."""
        return self.verdict in (FAILED, TIMED_OUT)


class SkipRung(Exception):
    """Raised by a rung that cannot run here: the reason."""


def climb(rungs: Sequence[Rung], options: dict, num_gpus: int, folder: Path) -> list[Outcome]:
    """Run the rungs in order.

    One that needs what failed, or more GPUs than there are, is skipped with the reason.
    """
    outcomes: dict[str, Outcome] = {}
    for rung in rungs:
        missing = [name for name in rung.needs if name in outcomes and outcomes[name].is_bad]
        if missing:
            outcome = _skipped(rung, f"needs {', '.join(missing)}")
        elif options["device"] == "cuda" and num_gpus < rung.min_gpus:
            outcome = _skipped(rung, f"needs {rung.min_gpus} GPUs, {num_gpus} here (--gpus)")
        else:
            print(f"{rung.title} … (at most {rung.deadline_s:.0f} s)", flush=True)
            outcome = run_rung(rung, options, folder)
        print(f"  {outcome.verdict}: {outcome.summary}", flush=True)
        outcomes[rung.name] = outcome
    return list(outcomes.values())


def run_rung(rung: Rung, options: dict, folder: Path) -> Outcome:
    """Run one rung in a session of its own, and end all of it at the deadline."""
    log, answer = folder / f"{rung.name}.log", folder / f"{rung.name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "rungs.py"), rung.name, str(folder), json.dumps(options)]
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
        )
        try:
            status: int | None = process.wait(timeout=rung.deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(process)
    seconds = time.monotonic() - started
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ending: dict = {"seconds": seconds, "log": str(log), "log_tail": "\n".join(text[-LOG_TAIL_LINES:])}
    if status is None:
        last = text[-1] if text else "nothing was printed"
        summary = f"not done after {rung.deadline_s:.0f} s; last: {last[:200]}"
        return Outcome(name=rung.name, title=rung.title, verdict=TIMED_OUT, summary=summary, **ending)
    if status or not answer.is_file():
        last = text[-1] if text else "nothing was printed"
        return Outcome(
            name=rung.name, title=rung.title, verdict=FAILED, summary=f"status {status}: {last[:300]}", **ending
        )
    return judge(rung, json.loads(answer.read_text(encoding="utf-8")), ending)


def judge(rung: Rung, answer: dict, ending: dict) -> Outcome:
    """The verdict over a rung's answer: {"skipped"} or {"summary", "where", "numbers", "checks"}."""
    if "skipped" in answer:
        return dataclasses.replace(_skipped(rung, answer["skipped"]), seconds=ending["seconds"])
    checks = [Check(**check) for check in answer["checks"]]
    wrong = [
        f"{check.what}: {check.value:.4g}, must be {check.sign} {check.limit:.4g}" for check in checks if not check.ok
    ]
    if wrong:
        verdict = FAILED
    else:
        verdict = PASSED if answer["where"] == "cuda" else PRETENDED
        ending = ending | {"log_tail": ""}
    return Outcome(
        name=rung.name,
        title=rung.title,
        verdict=verdict,
        summary="; ".join(wrong) or answer["summary"],
        where=answer["where"],
        numbers=answer["numbers"],
        checks=[dataclasses.asdict(check) | {"ok": check.ok} for check in checks],
        **ending,
    )


def _skipped(rung: Rung, reason: str) -> Outcome:
    return Outcome(name=rung.name, title=rung.title, verdict=SKIPPED, summary=reason)


def _environment() -> dict[str, str]:
    own = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"PYTHONUNBUFFERED": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    # A Ray of its own: whatever else runs on this host may be full, or ask for a token.
    own |= {
        name: os.environ.get(name, default) for name, default in (("RAY_ADDRESS", "local"), ("OMP_NUM_THREADS", "1"))
    }
    return dict(os.environ) | own


def _end_session(process: subprocess.Popen) -> None:
    """Ask what is left of a rung's session to leave, then end it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + LEAVE_S
        while _session_lives(process) and time.monotonic() < end:
            time.sleep(0.1)
    process.wait(timeout=LEAVE_S)


def _session_lives(process: subprocess.Popen) -> bool:
    process.poll()  # else the leader stays as a zombie and counts
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
