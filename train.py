"""The entry point: command line -> plan -> running job -> loop.

    python train.py …                          a local Ray is started when none runs
    ray job submit -- python train.py …        on a cluster
    python train.py … --plan [text|json]       what would run where; starts nothing

Exit status: 0 done, 1 a failure while running, 2 the user's mistake, 130/143 interrupted or preempted, 128 + n if
signal n ended the driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from arguments import Command, parse_args
from slime_like.errors import ConfigError, RunError, UserError
from slime_like.job.command_line import wants_json
from slime_like.observability.ending import tell_lost_driver
from slime_like.planning.placement import cannot_run_yet
from slime_like.planning.report.render import PlanReport, as_json, make_report
from slime_like.sglang_backend.shared_memory import name_shared_directory, tidy_shared_memory
from slime_like.utils.logs import start_logging
from slime_like.utils.supervise import fork_driver


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the latter is SLURM's, before a time limit
        signal.signal(number, _terminate)
    try:
        command = parse_args(argv)
        start_logging(command.config.observability.log_level, line_format="%(levelname)s %(name)s: %(message)s")
        report = make_report(command.config, planning=command.plan is not None)
        if command.plan is not None:
            text = as_json(report) if command.plan == "json" else "\n\n".join([report.text(), *command.notes])
            print(text, flush=True)
            return 2 if report.problems else 0
        problems = [*report.problems, *command.config.not_yet(), *cannot_run_yet(report.plan)]
        if problems:
            raise ConfigError(problems)
        name_shared_directory()
        if (
            status := fork_driver(tidy_shared_memory, tell_lost_driver)
        ) is not None:  # we are the supervisor, and the run is over
            return status
        return _train(command, report)
    except UserError as error:
        if isinstance(error, ConfigError) and wants_json(argv):
            print(json.dumps({"problems": error.problems}))
        print(f"{type(error).__name__}:\n{error}" + _notes(error), file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{type(error).__name__}: {error}" + _notes(error), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `--plan | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        print("interrupted; everything that was started has been ended" + _notes(error), file=sys.stderr)
        return 130


def _train(command: Command, report: PlanReport) -> int:
    from slime_like.loops.whole_run import whole_run  # only here, so that --help, --plan and mistakes answer at once

    return whole_run(command, report)


def _notes(error: BaseException) -> str:
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", []))


def _terminate(signum, frame):
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
