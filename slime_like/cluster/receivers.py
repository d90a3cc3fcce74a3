"""The receivers of a run whose weights travel as deltas: one on each machine with engines of ours, started by the first
engine's actor there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import ray

from slime_like.cluster.ray_session import Wait
from slime_like.config.run import RunConfig
from slime_like.records import EngineEndpoint
from slime_like.utils.net import engine_url


class Receivers:
    """`add` every engine of ours before it starts; `beside` gives the endpoints with their receivers."""

    def __init__(self, config: RunConfig, run_dir: str):
        self._config, self._run_dir = config, run_dir
        self._starting: dict[str, ray.ObjectRef] = {}  # machine -> (url, key)
        self._machine_of: dict[int, str] = {}

    def add(self, engine_index: int, machine: str, host: str, actor: Any) -> None:
        """Begin starting a receiver on the engine's machine, if there is none yet.

        machine: Ray's id of it; host: its address.
        """
        self._machine_of[engine_index] = machine
        if machine in self._starting:
            return
        number = len(self._starting)
        root = os.path.abspath(
            self._config.sync.update_weight_local_checkpoint_dir or os.path.join(self._run_dir, "receivers")
        )
        directory, log_path = os.path.join(root, f"receiver-{number}"), f"{self._run_dir}/logs/receiver-{number}.log"
        timeout, level = self._config.engine.engine_start_timeout_s, self._config.observability.log_level
        self._starting[machine] = actor.start_receiver.remote(directory, host, log_path, timeout, level)

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
        placement = self._config.placement
        addresses = placement.rollout_external_receiver_addrs or []
        key, with_urls = os.environ.get(placement.rollout_external_receiver_api_key_env), []
        for endpoint in endpoints:
            if endpoint.external:
                url, its_key = engine_url(addresses[endpoint.index]), key
            else:
                url, its_key = started[self._machine_of[endpoint.index]]
            with_urls.append(dataclasses.replace(endpoint, receiver_url=url, receiver_key=its_key))
        return tuple(with_urls)

    def _first_on(self, machine: str) -> int:
        return min(index for index, where in self._machine_of.items() if where == machine)
