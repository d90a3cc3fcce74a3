"""The driver's side of a weight sync: what must happen on every engine before the first tensor and after the last. No torch.

How it is used:
    update = WeightUpdate(clients, transport, timeout_s)
    update.begin()          # pause, flush, open
    # every trainer source sends its tensors: base.make_publisher
    update.finish(version)  # close, flush, name the version, read it back, continue
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from slime_like.errors import SlimeLikeError, WeightSyncError
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: After a failure each engine is told once, and not waited for long: it may be the reason.
_ABANDON_TIMEOUT_S = 5.0


def version_directory(root: str, version: int) -> str:
    """Where the disk transport keeps one version under its root folder."""
    return os.path.join(root, f"version-{version:08d}")


class WeightUpdate:
    """One sync on all engines at once. Raises WeightSyncError, EngineError or WaitTimeout naming the engine; engines then stay paused.

    pause_mode: "abort" ends requests that are still running, "retract" lets them go on later with the new weights.
    watch: asked each second during a wait; what it raises ends the sync.
    """

    def __init__(self, clients: list[EngineClient], transport: str, timeout_s: float, pause_mode: str = "abort", watch: Callable[[], None] | None = None):
        self._clients = clients
        self._transport = transport
        self._timeout_s = timeout_s
        self._pause_mode = pause_mode
        self._watch = watch

    def begin(self) -> None:
        """Stop generation, forget cached prefixes, and get every engine ready to receive."""
        self._on_all(self._begin_one, "begin weight update")

    def finish(self, version: int, directory: str | None = None) -> None:
        """Make every engine serve the weights just sent as `version`, prove it by reading the version back, and continue generation.

        directory: root folder of the disk transport, which is loaded here.
        """
        if self._transport == "disk" and directory is None:
            raise WeightSyncError("the disk transport needs its folder")
        self._on_all(lambda client: self._finish_one(client, version, directory), "finish weight update")
        found = self._on_all(lambda client: client.weight_version(), "read the weight version back")
        wrong = {name: got for name, got in found.items() if got != str(version)}
        if wrong:
            raise WeightSyncError(f"weight version {version} was sent, but " + ", ".join(f"{name} reports {got!r}" for name, got in wrong.items()))
        self._on_all(lambda client: client.continue_generation(), "continue generation")

    def abandon(self) -> None:
        """After a failure: close what is open, as far as it can be reached. Engines stay paused: they may hold half of the weights."""
        for client in self._clients:
            try:
                client.end_weight_update(timeout_s=_ABANDON_TIMEOUT_S)
            except SlimeLikeError as error:
                logger.warning("abandoned weight update: %s", error)

    def _begin_one(self, client: EngineClient) -> None:
        try:
            client.pause_generation(self._pause_mode)
        except EngineHttpError as error:
            if error.status != 404:  # an SGLang without it: end what runs, and rely on nobody sending more
                raise
            client.abort_all()
        client.flush_cache(self._timeout_s)
        if self._transport != "disk":
            client.begin_weight_update()

    def _finish_one(self, client: EngineClient, version: int, directory: str | None) -> None:
        if self._transport == "disk":
            assert directory is not None, "checked in finish"
            client.update_weights_from_disk(version_directory(directory, version), timeout_s=self._timeout_s)
        else:
            client.end_weight_update()
        # Flush before resuming: SGLang may serve cached prefixes computed with the old weights.
        client.flush_cache(self._timeout_s)
        client.update_weight_version(str(version))

    def _on_all(self, action, phase: str) -> dict:
        tasks = {f"engine {c.endpoint.index} at {c.url}": (lambda c=c: action(c)) for c in self._clients}
        return run_together(tasks, timeout_s=self._timeout_s, who="driver", phase=phase, watch=self._watch)
