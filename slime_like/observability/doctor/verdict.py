"""From what is known of a run to what became of it, and to what to do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from slime_like.observability.doctor.evidence import Disk, Evidence, LogEnd, without_secrets
from slime_like.observability.doctor.processes import RAY, SUPERVISOR, RunProcess, phase_of, shown

#: A run counts as hung after so many times its longest pause between two signs of progress so far, and at least …
_PATIENCE, _LEAST_S = 3.0, 60.0
#: … and before its first sign, as long as parts may take to start unless the config says it.
_START_S = 600.0
#: Less than this is little room: of a file system, and of its share.
_LITTLE_BYTES, _LITTLE_SHARE = 1 << 30, 0.01
_SHOWN_LOGS, _SHOWN_STACKS = 3, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """state: running, hung, done, failed or killed. The rest is what a person needs to go on."""

    state: str
    why: str
    role: str | None
    rank: int | None
    pid: int | None
    phase: str | None
    step: int | None
    last_progress: str
    seconds_ago: float | None
    log_file: str | None
    logs: tuple[LogEnd, ...]
    disks: tuple[Disk, ...]
    processes: tuple[RunProcess, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def judge(
    evidence: Evidence,
    processes: Sequence[RunProcess],
    *,
    driver: int | None,
    hung_after_s: float | None = None,
    now: float | None = None,
) -> Verdict:
    """What became of the run. driver: its process, while it lives. hung_after_s: in place of what follows from it."""
    now = time.time() if now is None else now
    end = evidence.end or {}
    last = end.get("last_progress") if isinstance(end.get("last_progress"), dict) else {}
    what, when = evidence.last_progress or ("its start", evidence.began)
    if last and isinstance(last.get("time"), int | float):
        what, when = str(last.get("what")), float(last["time"])
    state, why = _state(evidence, processes, driver, now - when, hung_after_s, now)
    culprit = _culprit(processes)
    alive = driver is not None
    role, rank = _role_and_rank(None if culprit is None else culprit.role)
    by_driver = next((one.stack for one in processes if one.pid == driver), ())
    return Verdict(
        state=state,
        why=without_secrets(why),
        role=role if alive else end.get("role"),
        rank=rank if alive else end.get("rank"),
        pid=(culprit.pid if culprit else driver) if alive else end.get("pid"),
        phase=phase_of(by_driver) if alive else end.get("phase"),
        step=evidence.num_done if alive else end.get("step", evidence.num_done),
        last_progress=what,
        seconds_ago=max(0.0, now - when),
        log_file=_log_file(evidence, culprit) if alive else end.get("log_file") or _log_file(evidence, None),
        logs=_telling(evidence.logs),
        disks=evidence.disks,
        processes=tuple(processes),
        advice=tuple(_advice(evidence, processes, state, driver)),
    )


def _state(
    evidence: Evidence,
    processes: Sequence[RunProcess],
    driver: int | None,
    idle_s: float,
    hung_after_s: float | None,
    now: float,
) -> tuple[str, str]:
    """(state, why)."""
    if driver is not None:
        stopped = [one for one in processes if one.stopped]
        if stopped:
            names = ", ".join(f"{one.role} (process {one.pid}, {one.name})" for one in stopped[:4])
            return "hung", f"stopped, by SIGSTOP or a debugger: {names}"
        patience = hung_after_s or _patience(evidence)
        written = [log.name for log in evidence.logs if log.at_work and now - log.modified < _LEAST_S / 2]
        if idle_s <= patience or (written and hung_after_s is None):
            return "running", f"{written[0]} is being written" if written and idle_s > patience else ""
        return "hung", f"no progress for {idle_s:.0f} s; it counts as hung after {patience:.0f} s"
    if evidence.end is not None:
        error = evidence.end.get("error")
        status = evidence.end.get("exit_status")
        if isinstance(error, dict):
            return "failed", f"{error.get('type')}: {error.get('message')} (exit status {status})"
        return ("done", f"exit status {status}") if not status else ("failed", f"exit status {status}")
    if evidence.num_rollout is not None and evidence.num_done >= evidence.num_rollout:
        return "done", f"all {evidence.num_rollout} rollouts"
    of = "" if evidence.num_rollout is None else f" of {evidence.num_rollout}"
    return "killed", f"its driver is gone from this host after {evidence.num_done}{of} rollouts, without a word here"


def _patience(evidence: Evidence) -> float:
    if evidence.last_progress is None:
        seconds = evidence.config.get("engine", {}).get("engine_start_timeout_s")
        return float(seconds) if isinstance(seconds, int | float) else _START_S
    return max(_LEAST_S, _PATIENCE * evidence.longest_gap_s)


def _culprit(processes: Sequence[RunProcess]) -> RunProcess | None:
    """Who is stopped."""
    return next((one for one in processes if one.stopped), None)


def _role_and_rank(name: str | None) -> tuple[str | None, int | None]:
    """Of the stem of a log: "engine-0" -> engine, 0."""
    if name is None:
        return None, None
    role, _, number = name.rpartition("-")
    return (role, int(number)) if role and number.isdigit() else (name, None)


def _log_file(evidence: Evidence, culprit: RunProcess | None) -> str | None:
    names = [log.name for log in evidence.logs]
    if culprit is not None and f"logs/{culprit.role}.log" in names:
        return f"logs/{culprit.role}.log"
    telling = [log.name for log in evidence.logs if log.telling]
    return next(iter(telling or names), None)


def _telling(logs: Sequence[LogEnd]) -> tuple[LogEnd, ...]:
    """Those that say something wrong, else the newest that says anything."""
    telling = [log for log in logs if log.telling]
    return tuple(telling[:_SHOWN_LOGS] or [log for log in logs if log.lines][:1])


def _advice(evidence: Evidence, processes: Sequence[RunProcess], state: str, driver: int | None) -> list[str]:
    advice = []
    for disk in evidence.disks:
        if disk.free_bytes < min(_LITTLE_BYTES, _LITTLE_SHARE * disk.total_bytes + (64 << 20)):
            advice.append(
                f"{disk.path} is full: {disk.free_bytes / 1e6:.0f} MB are free. Free some before anything else."
            )
    goes_on = (
        f"the same command with --resume auto goes on after {max(evidence.checkpoints)} rollouts"
        if evidence.checkpoints
        else "there is no checkpoint: the same command with --resume auto starts anew"
        + ("" if evidence.saves else "; --save-interval N would keep some")
    )
    if state == "hung":
        for one in processes:
            if one.stopped:
                advice.append(f"kill -CONT {one.pid} lets {one.role} go on.")
        engines = sorted({one.role for one in processes if one.stopped and one.role.startswith("engine")})
        if engines and evidence.config.get("engine", {}).get("max_engine_restarts"):
            advice.append(f"or kill -KILL its process: {', '.join(engines)} is replaced, and the run goes on.")
        ending = "saves what is trained, and ends it" if evidence.saves else "ends it"
        advice.append(f"kill -TERM {driver} {ending}; {goes_on}.")
    if state == "killed":
        advice.append(f"Look at the end of what train.py printed, and at dmesg: was the host out of memory? {goes_on}.")
        advice.append("Or it runs on another host: ask there.")
    if state == "failed":
        advice.append(f"When what it says is mended: {goes_on}.")
    if driver is None and processes:
        pids = " ".join(str(one.pid) for one in processes)
        advice.append(f"{len(processes)} processes of it still run, without a driver: kill {pids}")
    return advice


def as_text(verdict: Verdict, path: str, num_rollout: int | None) -> str:
    """One screen."""
    ago = "" if verdict.seconds_ago is None else f", {_duration(verdict.seconds_ago)} ago"
    lines = [f"{verdict.state.upper()}  {path}"]
    if verdict.why:
        lines.append(f"  why            {verdict.why}")
    if verdict.role is not None:
        who = verdict.role if verdict.rank is None else f"{verdict.role} rank {verdict.rank}"
        lines.append(f"  who            {who}" + (f", process {verdict.pid}" if verdict.pid else ""))
    of = "" if num_rollout is None else f" of {num_rollout}"
    where = f"step {verdict.step}{of}" + (f", {verdict.phase}" if verdict.phase else "")
    lines += [f"  where          {where}", f"  last progress  {verdict.last_progress}{ago}"]
    if verdict.state != "done":
        lines += [f"  log file       {verdict.log_file}"] if verdict.log_file else []
        for log in verdict.logs:
            lines += [f"  {log.name}"] + [f"    | {line}" for line in log.lines]
    rooms = [f"{disk.path} {disk.free_bytes / 1e9:.1f} of {disk.total_bytes / 1e9:.0f} GB" for disk in verdict.disks]
    lines.append("  free           " + ", ".join(rooms))
    if verdict.state != "running":
        stacks = sorted((one for one in verdict.processes if one.stack), key=_interest)
        for process in stacks[:_SHOWN_STACKS]:
            stopped = ", stopped" if process.stopped else ""
            lines.append(f"  {process.role} (process {process.pid}, {process.name}{stopped}) is in")
            lines += [f"    {frame}" for frame in shown(process.stack)]
    lines += [f"  {note}" for note in verdict.notes]
    lines += [f"  do             {text}" for text in verdict.advice]
    return "\n".join(lines)


def _interest(process: RunProcess) -> tuple[bool, bool, int]:
    """Sorts processes: whoever is stopped, then those that wait or compute, then those that look after them."""
    looks_after = process.role in (SUPERVISOR, RAY) or process.name.startswith(("ray::EngineActor", "guard"))
    return not process.stopped, looks_after, process.pid


def _duration(seconds: float) -> str:
    """Example: 7502 -> "2 h 5 min"."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} days"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"
