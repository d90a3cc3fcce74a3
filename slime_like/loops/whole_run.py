"""A checked command -> a run, from its directory to its end: what train.py does in the driver. Whatever ends it is end
in one screen, which also lies in the run directory (observability/ending.py).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, UserError
from slime_like.job import resume
from slime_like.job.build import build
from slime_like.job.command_line import Command
from slime_like.job.resolve import resolve
from slime_like.job.running import ResolvedRun
from slime_like.loops import sync_loop
from slime_like.observability import ending
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.planning.report.render import PlanReport, as_json, render_plan
from slime_like.utils.files import keep_files_private, write_atomic
from slime_like.utils.full_disk import LOST_WRITES
from slime_like.utils.supervise import keep_run_dir, keep_state


def whole_run(command: Command, report: PlanReport) -> int:
    """Run it; the exit status. What is raised carries the screen as its last note; SystemExit has printed it."""
    keep_files_private(share=command.config.observability.share_run_dir)
    resolved = resolve(command.config, report.plan)
    run, plan = resolved.run, resolved.plan
    (Path(run.path) / ending.FILE).unlink(missing_ok=True)  # of the run that is gone on with
    write_atomic(run.config, resolved.config.to_json())
    write_atomic(run.plan, as_json(dataclasses.replace(report, plan=plan)))
    keep_run_dir(run.path)
    keep_state(resolved.progress.to_json())  # it may be killed before it has begun with anything
    resolved.progress.keep = keep_state
    console = ProgressConsole(resolved.num_rollout)
    for note in (*command.notes, *resolved.notes, render_plan(plan), f"run directory {run.path}"):
        console.note(note)
    try:
        _drive(resolved, console)
    except BaseException as error:
        _tell(error, resolved)
        raise
    with LOST_WRITES.going_on(f"{run.path}/{ending.FILE}"):  # a full disk fails no run that is done
        ending.ending_of(None, 0, resolved.progress, run).write(run)
    console.note(f"done; see {run.path}")
    return 0


def _drive(resolved: ResolvedRun, console: ProgressConsole) -> None:
    with MetricsLog(resolved.run, tensorboard=resolved.config.observability.use_tensorboard) as log:
        job = build(resolved)
        try:
            sync_loop.run(job, log, console)
        finally:
            job.close()


def exit_status(error: BaseException) -> int:
    """Of train.py, when this ends it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1


def _tell(error: BaseException, resolved: ResolvedRun) -> None:
    end = ending.ending_of(error, exit_status(error), resolved.progress, resolved.run)
    screen = end.screen(resolved.num_rollout, advice(error, resolved.config))
    try:
        end.write(resolved.run)
    except OSError as failure:  # a full disk may be what ended the run
        screen += f"\n  end.json was not written: {failure}"
    if isinstance(error, SystemExit):
        print(screen, file=sys.stderr)
    else:
        error.add_note(screen)


def advice(error: BaseException, config: RunConfig) -> str:
    """What a user can do after this end."""
    if isinstance(error, UserError):
        return "mend what the message names; the run directory can go on with --resume auto"
    again = f"the same command with --run-dir {config.observability.run_dir} --resume auto"
    if config.checkpoint.save is None:
        return f"{again} starts anew: nothing was saved (--save-interval)"
    try:
        point = resume.resume_point(config)
    except CheckpointError as unusable:
        return f"{unusable}"
    if point is None:
        return f"{again} starts anew: no checkpoint was written yet"
    return f"{again} goes on after {point.num_rollouts_done} rollouts"
