"""`python -m slime_like.tinker.server --base-model FOLDER …`: the server of clients that train over HTTP.

Exit status as train.py's: 0 ended by a signal in order, 1 a failure while running, 2 the user's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from slime_like.errors import ConfigError, RunError, UserError
from slime_like.job.command_line import wants_json
from slime_like.tinker.options import ServerCommand, read_command, tenant_room
from slime_like.utils.files import RunDirectory, keep_files_private, private_folder
from slime_like.utils.logs import start_logging
from slime_like.utils.supervise import fork_driver

if TYPE_CHECKING:
    import uvicorn

    from slime_like.tinker.backends.start import Cluster

logger = logging.getLogger(__name__)

#: glibc's name for the most heaps (malloc.h), and how many.
_M_ARENA_MAX, _HEAPS = -8, 2
#: How long requests that are being answered may take at the end.
_GRACE_S = 5


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit status."""
    from slime_like.sglang_backend.shared_memory import name_shared_directory, tidy_shared_memory

    signal.signal(signal.SIGTERM, _terminate)
    try:
        command = read_command(argv)
        if command.plan is not None:
            print(command.to_json() if command.plan == "json" else command.text(), flush=True)
            return 2 if command.report.problems else 0
        level = command.config.observability.log_level or "info"
        start_logging(level, line_format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        name_shared_directory()
        if (status := fork_driver(tidy_shared_memory)) is not None:  # we are the supervisor, and the server has ended
            return status
        return _run(command)
    except UserError as error:
        if isinstance(error, ConfigError) and wants_json(argv):
            print(json.dumps({"problems": error.problems}))
        print(f"{type(error).__name__}:\n{error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `--plan | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been ended", file=sys.stderr)
        return 130


def _run(command: ServerCommand) -> int:
    # Heavy imports only here, so that --help, --plan and mistakes answer at once.
    from slime_like.tinker.backends.start import start_cluster
    from slime_like.tinker.store.database import database_url

    keep_few_heaps()
    database_url(command.server.database)  # raises before anything is started
    share = command.config.observability.share_run_dir
    keep_files_private(share=share)
    private_folder(command.server.state_folder, share=share)
    run = RunDirectory.create(command.config, root=os.path.join(command.server.state_folder, "runs"))
    for note in (*command.notes, f"run directory {run.path}"):
        logger.info("%s", note)
    config = dataclasses.replace(
        command.config, observability=dataclasses.replace(command.config.observability, run_dir=run.path)
    )
    cluster = start_cluster(config, command.report.plan, run, tenant_room(command.config, command.server))
    try:
        asyncio.run(_serve(command, cluster))
    finally:
        cluster.close()
    return 0


def keep_few_heaps() -> None:
    """Memory that threads have given back is used again by other threads.

    glibc gives threads heaps of their own, 8 a core, and each keeps what it had at its busiest. A server has some 25
    threads, of which one at a time runs Python: with a heap for each it grew on, by 18 MB over 2,500 rounds of a load;
    with two by 7, and no more. What MALLOC_ARENA_MAX says counts instead; other C libraries have no such thing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, _HEAPS)


async def _serve(command: ServerCommand, cluster: Cluster) -> None:
    """Until a signal."""
    import uvicorn

    from slime_like.tinker.assemble import running_app

    server = command.server
    async with running_app(command, cluster) as app:
        config = uvicorn.Config(
            app,
            host=server.host,
            port=server.port,
            log_level="warning",
            ssl_certfile=server.tls_certificate,
            ssl_keyfile=server.tls_key,
            timeout_graceful_shutdown=_GRACE_S,
            lifespan="off",
        )
        web = uvicorn.Server(config)
        web.capture_signals = contextlib.nullcontext  # type: ignore  # uvicorn would raise them again at the end
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _stop, web)
        serving = asyncio.create_task(web.serve())
        while not web.started and not serving.done():
            await asyncio.sleep(0.02)
        if web.started:
            host, port = web.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if server.tls_certificate else "http"
            print(f"serving {server.name} at {scheme}://{host}:{port}", flush=True)
        await serving


def _stop(web: uvicorn.Server) -> None:
    web.force_exit = web.should_exit  # the second signal does not wait for clients
    web.should_exit = True


def _terminate(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
