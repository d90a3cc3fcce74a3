"""The driver's side of a weight sync: what must happen on every engine before the first tensor and after the last. No torch.

How it is used:
    update = WeightUpdate(clients, transport, timeout_s)
    update.begin()          # pause, open
    # every trainer source sends its tensors: base.make_publisher
    update.load(version, directory)  # where they lie on disk: the engines take them
    update.open_for_digests()
    # every trainer source compares digests: receipt.Receipt
    update.finish(version)  # close, flush, name the version, read it back, continue
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from slime_like.errors import SlimeLikeError, WaitTimeout, WeightSyncError
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.weight_sync.receiver_client import ReceiverClient
from slime_like.weight_sync.shards import check_whole
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: After a failure each engine is told once, and not waited for long: it may be the reason.
_ABANDON_TIMEOUT_S = 5.0
#: How much of the deadline a flush beside retracted requests gets: why it failed must be heard before the wait for all engines ends.
_FLUSH_SHARE = 0.8
#: Transports that leave the weights in a folder which the engine then loads.
_FROM_FOLDER = ("disk", "delta")


def version_directory(root: str, version: int) -> str:
    """Where the disk transport keeps one version under its root folder."""
    return os.path.join(root, f"version-{version:08d}")


class WeightUpdate:
    """One sync on all engines at once. Raises WeightSyncError, EngineError or WaitTimeout naming the engine; engines then stay paused.

    pause_mode: "abort" ends requests that are still running; "retract" computes their tokens again with the new weights before they go on;
    "in_place" lets them go on with what the old weights left in the cache. With the last one the cache is forgotten only where nothing runs.
    watch: asked each second during a wait; what it raises ends the sync.
    """

    def __init__(self, clients: list[EngineClient], transport: str, timeout_s: float, pause_mode: str = "abort", watch: Callable[[], None] | None = None):
        self._clients = clients
        self._transport = transport
        self._timeout_s = timeout_s
        self._pause_mode = pause_mode
        self._watch = watch

    def begin(self) -> None:
        """Stop generation and get every engine ready to receive."""
        self._on_all(self._begin_one, "begin weight update")

    def load(self, version: int, directory: str | None) -> None:
        """Every engine loads `version` from its folder: below `directory` with the disk transport, its receiver's with delta. Others have it already."""
        if self._transport not in _FROM_FOLDER:
            return
        if self._transport == "disk" and directory is None:
            raise WeightSyncError("the disk transport needs its folder")
        if self._transport == "disk":
            check_whole(version_directory(directory or "", version))
        self._on_all(lambda client: self._load_one(client, version, directory), "load weights from disk")

    def open_for_digests(self) -> None:
        """Before digests are compared: SGLang takes no request of our loader outside of a session, and loads a folder only without one."""
        if self._transport in _FROM_FOLDER:
            self._on_all(lambda client: client.begin_weight_update(), "begin weight update")

    def _load_one(self, client: EngineClient, version: int, directory: str | None) -> None:
        endpoint = client.endpoint
        if self._transport == "delta":
            assert endpoint.receiver_url is not None, "the trainer has sent to it"
            folder = ReceiverClient(endpoint.receiver_url, endpoint.receiver_key, self._timeout_s).folder_of(version)
        else:
            folder = version_directory(directory or "", version)
        client.update_weights_from_disk(folder, timeout_s=self._timeout_s)

    def finish(self, version: int) -> None:
        """Make every engine serve the weights just sent as `version`, prove it by reading the version back, and continue generation."""
        self._on_all(lambda client: self._finish_one(client, version), "finish weight update")
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
            if error.status == 422:
                raise WeightSyncError(f"this SGLang does not know --update-weight-pause-mode {self._pause_mode}. Fix: abort. ({error})") from error
            if error.status != 404:
                raise
            if self._pause_mode != "abort":
                raise WeightSyncError(f"this SGLang cannot pause, so --update-weight-pause-mode {self._pause_mode} is impossible. Fix: abort.") from error
            client.abort_all()  # end what runs, and rely on nobody sending more
        if self._transport not in _FROM_FOLDER:
            client.begin_weight_update()

    def _finish_one(self, client: EngineClient, version: int) -> None:
        client.end_weight_update()
        # Flush before resuming: SGLang may serve cached prefixes computed with the old weights.
        self._flush(client)
        client.update_weight_version(str(version))

    def _flush(self, client: EngineClient) -> None:
        if self._pause_mode == "abort":
            client.flush_cache(self._timeout_s)
        elif self._pause_mode == "retract":
            self._flush_beside_retracted(client)
        elif not client.try_flush_cache():
            logger.warning(
                "engine %d at %s: requests are running, so prefixes computed with the old weights stay in its cache, for new requests too. "
                "Fix: --update-weight-pause-mode retract, or --sglang-disable-radix-cache.",
                client.endpoint.index,
                client.url,
            )

    def _flush_beside_retracted(self, client: EngineClient) -> None:
        try:
            client.flush_cache(_FLUSH_SHARE * self._timeout_s)
        except WaitTimeout as error:
            raise WeightSyncError(f"{error}. SGLang 0.5.17 does not flush while retracted requests wait. Fix: --update-weight-pause-mode abort.") from error

    def _on_all(self, action, phase: str) -> dict:
        tasks = {f"engine {c.endpoint.index} at {c.url}": (lambda c=c: action(c)) for c in self._clients}
        return run_together(tasks, timeout_s=self._timeout_s, who="driver", phase=phase, watch=self._watch)
