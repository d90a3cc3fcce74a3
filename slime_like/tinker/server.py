"""`python -m slime_like.tinker.server --base-model FOLDER …`: the server of clients that train over HTTP.

Exit status as train.py's: 0 ended by a signal in order, 1 a failure while running, 2 the user's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from slime_like.errors import ConfigError, RunError, UserError
from slime_like.tinker.options import ServerCommand, read_command
from slime_like.utils.files import RunDirectory
from slime_like.utils.logs import start_logging
from slime_like.utils.supervise import fork_driver

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from slime_like.tinker.backends.start import Cluster

logger = logging.getLogger(__name__)

#: How long requests that are being answered may take at the end.
_GRACE_S = 5


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit status."""
    from slime_like.sglang_backend.shared_memory import tidy_shared_memory

    signal.signal(signal.SIGTERM, _terminate)
    try:
        command = read_command(argv)
        if command.plan is not None:
            print(command.to_json() if command.plan == "json" else command.text(), flush=True)
            return 2 if command.report.problems else 0
        level = command.config.observability.log_level or "info"
        start_logging(level, line_format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if (status := fork_driver(tidy_shared_memory)) is not None:  # we are the supervisor, and the server has ended
            return status
        return _run(command)
    except UserError as error:
        if isinstance(error, ConfigError) and "json" in argv and "--plan" in argv:
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

    os.makedirs(command.server.state_folder, exist_ok=True)
    run = RunDirectory.create(command.config, root=os.path.join(command.server.state_folder, "runs"))
    for note in (*command.notes, f"run directory {run.path}"):
        logger.info("%s", note)
    config = dataclasses.replace(
        command.config, observability=dataclasses.replace(command.config.observability, run_dir=run.path)
    )
    cluster = start_cluster(config, command.report.plan, run)
    try:
        asyncio.run(_serve(command, cluster))
    finally:
        cluster.close()
    return 0


async def _serve(command: ServerCommand, cluster: Cluster) -> None:
    """Until a signal."""
    import uvicorn

    server = command.server
    async with _app(command, cluster) as app:
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
        web.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # it would raise them again at the end
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


@contextlib.asynccontextmanager
async def _app(command: ServerCommand, cluster: Cluster) -> AsyncIterator[FastAPI]:
    """The whole server but its socket; what was started of it ends with the block."""
    from slime_like.tinker.api.app import make_app
    from slime_like.tinker.api.settings import ApiSettings, ServedModel
    from slime_like.tinker.backends.engines import EngineSampling, SamplingOptions
    from slime_like.tinker.backends.sample_bodies import EngineLimits
    from slime_like.tinker.backends.trainer import GroupTraining, TrainerOptions
    from slime_like.tinker.execution.settings import ServiceSettings
    from slime_like.tinker.service import CallService
    from slime_like.tinker.store.database import Database

    server, config = command.server, command.config
    base_folder = os.path.abspath(server.base_model)
    trainer = GroupTraining(
        cluster.start_trainer,
        TrainerOptions(
            base_model=server.name,
            model=config.model,
            context_length=command.context_length,
            lora_alpha=server.default_lora_alpha,
            max_rank=server.max_lora_rank,
            max_resident=server.max_adapters_resident,
        ),
        first=cluster.first_trainer,
    )
    limits = EngineLimits(
        context_length=command.context_length,
        vocab_size=config.model.vocab_size,
        takes_seeds=command.takes_seeds,
    )
    engines = EngineSampling(
        cluster.fleet,
        SamplingOptions(
            base_folder=base_folder,
            limits=limits,
            max_adapters=server.max_cpu_loras,
            max_rank=server.max_lora_rank,
            concurrency=config.engine.sglang_server_concurrency,
            request_timeout_s=config.rollout.rollout_request_timeout_s,
        ),
    )
    database = Database(server.database)
    state = os.path.abspath(server.state_folder)
    service = CallService(
        database,
        trainer,
        engines,
        ServiceSettings(
            state_folder=os.path.join(state, "state"),
            weights_folder=server.weights,
            batch_tokens=server.batch_tokens,
            max_adapters_resident=server.max_models,
            max_samples_running=server.max_samples_running,
            max_samples_running_a_tenant=server.max_samples_a_tenant,
            snapshot_every_steps=server.snapshot_every_steps,
            session_timeout_s=server.session_timeout_s,
        ),
        staging=os.path.join(state, "staging"),
    )
    model = ServedModel(
        name=server.name,
        context_length=command.context_length,
        tokenizer=base_folder,
        architecture=architecture_of(base_folder),
        max_lora_rank=server.max_lora_rank,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        stack.push_async_callback(engines.close)
        stack.push_async_callback(trainer.close)
        await database.upgrade()
        await trainer.begin()
        await service.start()
        stack.push_async_callback(service.close)
        yield make_app(service, database, ApiSettings(models=(model,)))


def architecture_of(folder: str) -> str:
    """HF's name of what the folder holds."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return str((json.load(file).get("architectures") or [""])[0])


def _terminate(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
