"""The entry point: command line -> plan -> running job -> loop.

    python train.py …                          a local Ray is started when none runs
    ray job submit -- python train.py …        on a cluster
    python train.py … --plan [text|json]       what would run where; starts nothing

Exit status: 0 done, 1 a failure while running, 2 the user's mistake, 130/143 interrupted.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

from arguments import Command, parse_args
from slime_like.errors import ConfigError, RunError, UserError
from slime_like.planning.placement import PlacementPlan, make_plan
from slime_like.planning.render import render_plan


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        command = parse_args(argv)
        plan = make_plan(command.config)
        if command.plan == "json":
            print(json.dumps(plan.to_dict(), indent=1))
            return 2 if plan.problems else 0
        if command.plan == "text":
            print(render_plan(plan))
            return 2 if plan.problems else 0
        if plan.problems:
            raise ConfigError(list(plan.problems))
        return _train(command, plan)
    except UserError as error:
        print(f"{type(error).__name__}:\n{error}" + _notes(error), file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{type(error).__name__}: {error}" + _notes(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been ended", file=sys.stderr)
        return 130


def _train(command: Command, plan: PlacementPlan) -> int:
    # Heavy imports only here, so that --help, --plan and mistakes answer at once.
    from slime_like.cluster.build import build, check_everything, resolve
    from slime_like.loops import sync_loop
    from slime_like.observability.console import ProgressConsole
    from slime_like.observability.metrics import MetricsLog
    from slime_like.utils.files import RunDirectory, write_atomic

    data = check_everything(command.config)
    run = RunDirectory.create(command.config)
    config = resolve(command.config, plan, run, data)
    write_atomic(run.config, config.to_json())
    write_atomic(run.plan, json.dumps(plan.to_dict(), indent=1))
    console = ProgressConsole(config.data.num_rollout)
    for note in (*command.notes, render_plan(plan), f"run directory {run.path}"):
        console.note(note)
    with MetricsLog(run, tensorboard=config.observability.use_tensorboard) as log:
        job = build(config, plan, run, data)
        try:
            sync_loop.run(job, log, console)
        finally:
            job.close()
    console.note(f"done; see {run.path}")
    return 0


def _notes(error: BaseException) -> str:
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", []))


def _terminate(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
