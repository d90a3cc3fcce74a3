"""One machine's part of an engine, as a Ray actor: it holds the GPUs, and the server that runs on them dies with it."""

from __future__ import annotations

import dataclasses
import logging
import time

import ray

from slime_like.cluster.train_group import redirect_output
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.launcher import Engine, EngineSpec, host_has_cuda, launch_engine
from slime_like.utils.logs import start_logging
from slime_like.utils.net import free_port

logger = logging.getLogger(__name__)


class EngineActor:
    """Holds an engine's GPUs on one machine and the SGLang server that runs on them as a child process."""

    def __init__(self, name: str, log_dir: str, log_level: str | None):
        redirect_output(f"{log_dir}/engine-actor-{name}.log")
        start_logging(log_level)
        self._engine: Engine | None = None

    def address(self) -> tuple[str, int]:
        """(this node's address, a free port there)."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(self, spec: EngineSpec, timeout_s: float) -> EngineEndpoint:
        """Start the server and wait until it is healthy. Only node rank 0's endpoint takes requests."""
        if spec.dtype is None:  # the trainer's own rule
            spec = dataclasses.replace(spec, dtype="bfloat16" if host_has_cuda() else "float32")
        started = time.monotonic()
        self._engine = launch_engine(spec, timeout_s)
        place, seconds = self._engine.endpoint.url, time.monotonic() - started
        logger.info("engine %d (pid %d) is healthy at %s after %.1f s", spec.index, self._engine.pid, place, seconds)
        return self._engine.endpoint

    def check(self) -> None:
        """Raise EngineError with the tail of the log if the server has ended."""
        if self._engine is not None:
            self._engine.check()

    def stop(self) -> None:
        """End the server."""
        if self._engine is not None:
            self._engine.close()
