"""The receivers of a run whose weights travel as deltas: one on each machine with engines of ours, whichever of them
come and go.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from typing import Any

import ray

from slime_like.cluster.ray_session import Wait, kill_actors
from slime_like.cluster.train_group import redirect_output
from slime_like.config.run import RunConfig
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint
from slime_like.utils.logs import start_logging
from slime_like.utils.net import engine_url
from slime_like.weight_sync.delta.receiver_client import RunningReceiver, start_receiver

#: Deadline of one question to the actors, and how long receivers that are told to end may take, in seconds.
_ASK_S, _STOP_S = 60.0, 15.0


class ReceiverActor:
    """Holds one machine's receiver as a child process."""

    def __init__(self, log_path: str, log_level: str | None):
        redirect_output(log_path)
        start_logging(log_level)
        self._receiver: RunningReceiver | None = None
        self._directory = ""

    def start(
        self, directory: str, host: str, log_path: str, timeout_s: float, log_level: str | None
    ) -> tuple[str, str]:
        """Start it; its URL and key. `directory` is removed at the end."""
        level = log_level or "info"
        self._receiver = start_receiver(directory, host=host, log_path=log_path, timeout_s=timeout_s, log_level=level)
        self._directory = directory
        return self._receiver.url, self._receiver.key

    def check(self) -> None:
        """Raise ReceiverError with the tail of its log if it has ended."""
        if self._receiver is not None:
            self._receiver.check()

    def stop(self) -> None:
        """End it."""
        if self._receiver is not None:
            self._receiver.close()
            shutil.rmtree(self._directory, ignore_errors=True)


class Receivers:
    """`add` every engine of ours before it starts; `beside` gives the endpoints with their receivers."""

    def __init__(self, config: RunConfig, run_dir: str):
        self._config, self._run_dir = config, run_dir
        self._actors: dict[str, Any] = {}  # machine -> its receiver's actor
        self._starting: dict[str, ray.ObjectRef] = {}  # machine -> (url, key)
        self._machine_of: dict[int, str] = {}

    def add(self, engine_index: int, machine: str, host: str, options: dict) -> None:
        """Begin starting a receiver on the engine's machine, if there is none yet.

        machine: Ray's id of it; host: its address; options: what puts an actor there, without a share of a GPU.
        """
        self._machine_of[engine_index] = machine
        if machine in self._starting:
            return
        number = len(self._starting)
        root = os.path.abspath(
            self._config.sync.update_weight_local_checkpoint_dir or os.path.join(self._run_dir, "receivers")
        )
        directory, logs = os.path.join(root, f"receiver-{number}"), f"{self._run_dir}/logs"
        timeout, level = self._config.engine.engine_start_timeout_s, self._config.observability.log_level
        actor = ray.remote(ReceiverActor).options(**options).remote(f"{logs}/receiver-actor-{number}.log", level)
        self._actors[machine] = actor
        self._starting[machine] = actor.start.remote(directory, host, f"{logs}/receiver-{number}.log", timeout, level)

    def beside(self, endpoints: Sequence[EngineEndpoint]) -> tuple[EngineEndpoint, ...]:
        """The endpoints, each with its receiver: ours, once it has started, or the one of
        --rollout-external-receiver-addrs.
        """
        started = {}
        if self._starting:
            refs = {
                f"the receiver beside engine {self._first_on(machine)}": ref for machine, ref in self._starting.items()
            }
            answers = Wait(self._config.engine.engine_start_timeout_s, whom="the receivers", phase="start").gather(refs)
            started = dict(zip(self._starting, answers, strict=True))
        key, with_urls = os.environ.get(self._config.placement.rollout_external_receiver_api_key_env), []
        for endpoint in endpoints:
            if endpoint.external:
                url, its_key = self._external_url(endpoint), key
            else:
                url, its_key = started[self._machine_of[endpoint.index]]
            with_urls.append(dataclasses.replace(endpoint, receiver_url=url, receiver_key=its_key))
        return tuple(with_urls)

    def check(self) -> None:
        """Raise ReceiverError with the tail of its log if a receiver of ours has ended."""
        refs = {
            f"the receiver beside engine {self._first_on(machine)}": actor.check.remote()
            for machine, actor in self._actors.items()
        }
        if refs:
            Wait(_ASK_S, whom="the receivers", phase="health check").gather(refs)

    def close(self) -> None:
        """End those of ours. Harmless when called twice."""
        actors, self._actors = list(self._actors.values()), {}
        if actors:
            refs = [actor.stop.remote() for actor in actors]
            ray.wait(refs, num_returns=len(refs), timeout=_STOP_S)
            kill_actors(actors)

    def _external_url(self, endpoint: EngineEndpoint) -> str:
        """By the engine's address: one that comes back there has another number."""
        placement = self._config.placement
        engines = [engine_url(address) for address in placement.rollout_external_engine_addrs or []]
        if endpoint.url not in engines:
            raise EngineError(
                f"engine {endpoint.index} at {endpoint.url} has no receiver beside it: it is not in"
                " --rollout-external-engine-addrs."
            )
        return engine_url((placement.rollout_external_receiver_addrs or [])[engines.index(endpoint.url)])

    def _first_on(self, machine: str) -> int:
        return min(index for index, where in self._machine_of.items() if where == machine)
