"""Which engines have ended: ours are watched as processes, external ones by whether they answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.errors import EngineError, RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.external_server import HealthWatch


class Vitals:
    """Asked by the fleet. processes: of our own engines; None where all are external."""

    def __init__(self, processes: EngineProcesses | None):
        self._processes = processes
        self._watches: dict[int, HealthWatch] = {}  # of external engines only

    def watch(self, endpoint: EngineEndpoint) -> None:
        """Ask an external engine again and again from now on; one of ours needs none."""
        if endpoint.external and endpoint.index not in self._watches:
            self._watches[endpoint.index] = HealthWatch([endpoint])

    def forget(self, index: int) -> None:
        """It is dead, or gone."""
        watch = self._watches.pop(index, None)
        if watch is not None:
            watch.stop()

    def silent(self) -> dict[int, RunError]:
        """External engines that have stopped answering, and since when; asks nobody itself."""
        failures: dict[int, RunError] = {}
        for index, watch in self._watches.items():
            try:
                watch.check()
            except EngineError as error:
                failures[index] = error
        return failures

    def ended(self, known: Collection[int] = ()) -> dict[int, RunError]:
        """Engines of ours beside the `known` ones whose process has ended, and what the end of their log says."""
        return {} if self._processes is None else self._processes.dead(known)

    def mute(self, clients: Iterable[EngineClient]) -> dict[int, RunError]:
        """External engines that do not answer now."""
        failures: dict[int, RunError] = {}
        for client in clients:
            if client.endpoint.external:
                try:
                    client.model_info()
                except RunError as error:
                    failures[client.endpoint.index] = EngineError(
                        f"external engine {client.endpoint.index} at {client.url} does not answer: {error}"
                    )
        return failures

    def close(self) -> None:
        """End all watches."""
        for index in list(self._watches):
            self.forget(index)
