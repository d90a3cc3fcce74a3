"""Which engines have ended, or hang: ours are watched as processes and by what their schedulers answer, external ones
by whether they answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.errors import EngineError, RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.external_server import HealthWatch
from slime_like.sglang_backend.hang_watch import EngineHangWatch


class Vitals:
    """Asked by the fleet. processes: of our own engines; None where all are external. hang_timeout_s: after which
    silence an engine of ours hangs (--engine-hang-timeout-s); 0: none ever does.
    """

    def __init__(self, processes: EngineProcesses | None, hang_timeout_s: float = 0.0):
        self._processes, self._hang_timeout_s = processes, hang_timeout_s
        self._watches: dict[int, HealthWatch] = {}  # of external engines
        self._hang_watches: dict[int, EngineHangWatch] = {}  # of ours

    def watch(self, endpoint: EngineEndpoint) -> None:
        """Ask an engine again and again from now on."""
        if endpoint.external:
            if endpoint.index not in self._watches:
                self._watches[endpoint.index] = HealthWatch([endpoint])
        elif self._hang_timeout_s and endpoint.index not in self._hang_watches:
            self._hang_watches[endpoint.index] = EngineHangWatch(endpoint, self._hang_timeout_s)

    def forget(self, index: int) -> None:
        """It is dead, or gone."""
        for watch in (self._watches.pop(index, None), self._hang_watches.pop(index, None)):
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

    def hanging(self, known: Collection[int] = ()) -> dict[int, RunError]:
        """Engines of ours beside the `known` ones whose process lives, and which have not answered for too long."""
        judgments = {index: watch.judgment() for index, watch in self._hang_watches.items() if index not in known}
        return {index: EngineError(said) for index, said in judgments.items() if said is not None}

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
        for index in [*self._watches, *self._hang_watches]:
            self.forget(index)
