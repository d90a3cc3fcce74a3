"""One weight sync, whole: begin -> send -> prove -> continue. No torch: the driver only gives the order.

Where engines load a folder it is send -> begin -> load -> prove -> continue: they generate until all of it is there;
with PublishOrder.rolling one engine after the other does the rest, while the others serve.

    driver      receipt = trainer.publish(PublishOrder(...))  # one call; after a failure: abandon(order.endpoints)
    every rank  receipt = run_session(order, ranks)             # ranks: sender.WeightSender

All ranks run the session together. Each source sends; the first one, the lead, also steers the engines for all.
Whatever fails on one rank is raised on every rank, and engines that are paused stay so: they may hold half of the
weights.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from slime_like.config.run import RunConfig
from slime_like.config.transports import RECEIVER, SHARED_FOLDER, transport_of
from slime_like.errors import SlimeLikeError, WaitTimeout, WeightSyncError
from slime_like.records import EngineEndpoint, SyncReceipt, WeightsRef
from slime_like.sglang_backend.adapter_client import AdapterClient
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.weight_sync.delta.receiver_client import ReceiverClient
from slime_like.weight_sync.together import run_together
from slime_like.weight_sync.transports.shards import check_whole

logger = logging.getLogger(__name__)

#: After a failure each engine is told once, and not waited for long: it may be the reason.
_ABANDON_TIMEOUT_S = 5.0
#: How much of the deadline a flush beside retracted requests gets: why it failed must be heard before the wait for
#: all engines ends.
_FLUSH_SHARE = 0.8
#: Steps that may each take an engine `timeout_s`: at most so many in one act of the lead (finish has three),
_LEAD_STEPS = 4
#: in a whole session (begin, send, whose end is waited for once more, load, open, and finish),
_NUM_STEPS = 8
#: and those that sources take one after another (connect, compare digests, look for what was never sent).
_STEPS_IN_TURN = 3
#: How long the news of a failure may take from rank to rank.
_HEAR_S = 10.0


def version_directory(root: str, version: int) -> str:
    """Where a shared folder keeps one version."""
    return os.path.join(root, f"version-{version:08d}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishOrder:
    """One sync, as the trainer's ranks are told: which weights go to which engines, how, and what proves them.

    timeout_s: how long each step may take an engine. directory: root of the shared folder with a transport that has
    one; with deltas where sources keep what they sent last. pause_mode: "abort" ends requests that are still running;
    "retract" computes their tokens again with the new weights before they go on; "in_place" lets them go on with what
    the old weights left in the cache, which is then forgotten only where nothing runs. finds_unsent: look for
    parameters of the engine of which nothing was sent; needs compares_digests. cards: of each endpoint, of each of its
    ranks, the trainer rank on the same card, which then sends everything to it; empty: pipeline stages send their
    shares to all. in_use: adapters that requests under way name, which engines serve on. rolling: engines load the
    folder one after another, each with its own proof, and only one is paused.
    """

    weights: WeightsRef
    endpoints: tuple[EngineEndpoint, ...]
    transport: str
    timeout_s: float
    pause_mode: str = "abort"
    directory: str | None = None
    compares_digests: bool = True
    finds_unsent: bool = False
    cards: tuple[tuple[int, ...], ...] = ()
    in_use: frozenset[WeightsRef] = frozenset()
    rolling: bool = False

    @staticmethod
    def of(
        config: RunConfig,
        transport: str,
        endpoints: Sequence[EngineEndpoint],
        weights: WeightsRef,
        *,
        cards: tuple[tuple[int, ...], ...] = (),
        in_use: frozenset[WeightsRef] = frozenset(),
    ) -> PublishOrder:
        """As the flags say. cards: where trainer and engines share GPUs; a transport that gains nothing by it leaves
        them out.
        """
        sync, directory = config.sync, config.sync.update_weight_disk_dir
        if directory is None and config.observability.run_dir:
            directory = os.path.join(config.observability.run_dir, "weights")
        return PublishOrder(
            weights=weights,
            endpoints=tuple(endpoints),
            transport=transport,
            timeout_s=sync.update_weight_timeout_s,
            pause_mode=config.pause_mode,
            directory=os.path.abspath(directory) if directory else None,
            compares_digests=sync.compares_digests and transport_of(transport).digests,
            finds_unsent=sync.verify_weight_sync == "full" and transport_of(transport).digests,
            cards=cards if transport_of(transport).by_card else (),
            in_use=in_use,
            rolling=sync.update_weight_rolling,
        )

    @property
    def route(self) -> PublishOrder:
        """The order without its weights: what a connection is made for and kept."""
        return dataclasses.replace(self, weights=WeightsRef(), in_use=frozenset())

    def longest_s(self, num_stages: int) -> float:
        """How long the driver waits for a rank: longer than all steps, since the rank itself says which engine is
        late in which step. num_stages: of the trainer's pipeline.
        """
        num_sources = len({source for ranks in self.cards for source in ranks}) or num_stages
        num_turns = len(self.endpoints) if self.rolling else 1
        return num_turns * (_NUM_STEPS + _STEPS_IN_TURN * num_sources) * self.timeout_s + _HEAR_S


class Publishes(Protocol):
    """The trainer, as whoever orders a sync sees it."""

    def publish(self, order: PublishOrder, watch: Callable[[], None] | None = None) -> SyncReceipt:
        """One whole sync. watch: asked each second; what it raises ends the wait."""


class Ranks(Protocol):
    """All ranks of the trainer, as a session sees them from one of them.

    Each method is collective, and raises on every rank if one fails.
    """

    def on_lead(self, phase: str, act: Callable[[], None], *, longest_s: float) -> None:
        """Do something on the lead while the others wait. longest_s: after which `act` has given up by itself."""

    def connect(self) -> None:
        """Join the engines; does nothing where that is done."""

    def send(self, weights: WeightsRef) -> SyncReceipt:
        """Every source sends its share; what was sent, by all."""

    def prove(self, endpoints: Sequence[EngineEndpoint]) -> tuple[int, int]:
        """Compare these engines' digests with what was sent: (engines compared, tensors of which it is not known where
        an engine keeps them).
        """


def run_session(order: PublishOrder, ranks: Ranks) -> SyncReceipt:
    """One sync, on every rank of the trainer. Engines generate again when it returns.

    Raises WeightSyncError, EngineError or WaitTimeout naming engine and phase; engines that it has paused then stay so
    (see abandon).
    """
    engines = EngineSide(order)

    def on_lead(phase: str, act: Callable[[], None]) -> None:
        ranks.on_lead(phase, act, longest_s=_LEAD_STEPS * order.timeout_s)

    loads_folder = engines.transport.loads_from is not None
    if not loads_folder:
        on_lead("begin", engines.begin)
    ranks.connect()
    receipt = ranks.send(order.weights)
    if receipt.num_tensors == 0:
        raise WeightSyncError(f"weights {order.weights}: the trainer sent no tensor")
    if engines.transport.compared_by_engines:
        receipt = dataclasses.replace(receipt, engines_proven=len(order.endpoints))
    for turn in engines.turns():
        if loads_folder:
            # Only now: engines go on generating while what they will load is gathered, sent and written.
            on_lead("begin", turn.begin)
            on_lead("load", turn.load)
        if order.compares_digests:
            started = time.monotonic()
            if loads_folder:
                on_lead("open for digests", turn.open)
            proven, left_out = ranks.prove(turn.endpoints)
            receipt = dataclasses.replace(
                receipt,
                engines_proven=receipt.engines_proven + proven,
                tensors_unproven=left_out,
                verify_seconds=receipt.verify_seconds + time.monotonic() - started,
            )
        on_lead("finish", turn.finish)
    return receipt


def abandon(endpoints: Sequence[EngineEndpoint]) -> None:
    """After a sync that failed: close the update sessions that are open, as far as engines can be reached. They stay
    paused.

    Whoever gave the order calls it: the rank that opened the sessions may be what died.
    """
    for endpoint in endpoints:
        try:
            EngineClient(endpoint, timeout_s=_ABANDON_TIMEOUT_S).close_weight_update()
        except SlimeLikeError as error:
            logger.warning("abandoned weight update: %s", error)


class EngineSide:
    """What happens on the engines of an order, on all of them at once.

    Raises WeightSyncError, EngineError or WaitTimeout naming the engine.
    """

    def __init__(self, order: PublishOrder):
        self._order = order
        self.transport = transport_of(order.transport)
        self._clients = [AdapterClient(endpoint, timeout_s=order.timeout_s) for endpoint in order.endpoints]

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """The engines."""
        return self._order.endpoints

    def turns(self) -> list[EngineSide]:
        """These engines as they take the weights up: all at the same time, or one behind the other."""
        if not self._order.rolling:
            return [self]
        return [EngineSide(dataclasses.replace(self._order, endpoints=(endpoint,))) for endpoint in self.endpoints]

    def begin(self) -> None:
        """Stop generation and get every engine ready to receive."""
        self._on_all(self._begin_one, "begin weight update")

    def load(self) -> None:
        """Every engine loads the version from its folder: the shared one, or its receiver's.

        With other transports it has it already.
        """
        order, loads_from = self._order, self.transport.loads_from
        if loads_from is None:
            return
        if loads_from == SHARED_FOLDER:
            if order.directory is None:
                raise WeightSyncError(
                    f"the {order.transport} transport needs its folder. Fix: --update-weight-disk-dir."
                )
            if not self.transport.of_adapters:
                check_whole(version_directory(order.directory, order.weights.version))
        self._on_all(self._load_one, "load weights from disk")

    def open(self) -> None:
        """Before digests are compared: SGLang takes no request of our loader outside of a session, and loads a folder
        only without one.
        """
        if self.transport.loads_from is not None:
            self._on_all(lambda client: client.begin_weight_update(), "begin weight update")

    def finish(self) -> None:
        """Make every engine serve what was sent under its version, prove it by reading the version back, and continue
        generation.
        """
        version = self._order.weights.version
        self._on_all(self._finish_one, "finish weight update")
        reported = self._on_all(lambda client: client.weight_version(), "read the weight version back")
        wrong = {name: got for name, got in reported.items() if got != str(version)}
        if wrong:
            raise WeightSyncError(
                f"weight version {version} was sent, but "
                + ", ".join(f"{name} reports {got!r}" for name, got in wrong.items())
            )
        if self.transport.needs_pause:
            self._on_all(lambda client: client.continue_generation(), "continue generation")

    def _begin_one(self, client: AdapterClient) -> None:
        if self.transport.needs_pause:
            self._pause(client)
        if self.transport.of_adapters:
            self._unload_others(client)
        elif self.transport.loads_from is None:
            client.begin_weight_update()

    def _pause(self, client: EngineClient) -> None:
        mode = self._order.pause_mode
        try:
            client.pause_generation(mode)
        except EngineHttpError as error:
            if error.status == 422:
                raise WeightSyncError(
                    f"this SGLang does not know --update-weight-pause-mode {mode}. Fix: abort. ({error})"
                ) from error
            if error.status != 404:
                raise
            if mode != "abort":
                raise WeightSyncError(
                    f"this SGLang cannot pause, so --update-weight-pause-mode {mode} is impossible. Fix: abort."
                ) from error
            client.abort_all()  # end what runs, and rely on nobody sending more

    def _load_one(self, client: AdapterClient) -> None:
        order, endpoint = self._order, client.endpoint
        if self.transport.of_adapters:
            folder = version_directory(order.directory or "", order.weights.version)
            client.load_adapter(str(order.weights), folder, timeout_s=order.timeout_s)
            return
        if self.transport.loads_from == RECEIVER:
            assert endpoint.receiver_url is not None, "the trainer has sent to it"
            folder = ReceiverClient(endpoint.receiver_url, endpoint.receiver_key, order.timeout_s).folder_of(
                order.weights.version
            )
        else:
            folder = version_directory(order.directory or "", order.weights.version)
        client.update_weights_from_disk(folder, timeout_s=order.timeout_s)

    def _unload_others(self, client: AdapterClient) -> None:
        """Before adapters are loaded beside the base, under the weights' own name, and beside the version before and
        those in use: the others go, whose last request has ended. While SGLang waits for one that runs, it loads
        nothing.
        """
        order, weights = self._order, self._order.weights
        versions = [dataclasses.replace(weights, version=weights.version - ago) for ago in (0, 1)]
        kept = {str(version) for version in (*versions, *order.in_use)}
        for name in client.adapters():
            if name.startswith(f"{weights.name}@") and (name not in kept or name == str(weights)):
                client.unload_adapter(name, timeout_s=order.timeout_s)

    def _finish_one(self, client: EngineClient) -> None:
        if self.transport.of_adapters:
            # Nothing to flush: SGLang keeps the cached prefixes of each adapter apart.
            client.update_weight_version(str(self._order.weights.version))
            return
        client.end_weight_update()
        # Flush before resuming: SGLang may serve cached prefixes computed with the old weights.
        self._flush(client)
        client.update_weight_version(str(self._order.weights.version))

    def _flush(self, client: EngineClient) -> None:
        mode, timeout_s = self._order.pause_mode, self._order.timeout_s
        if mode == "abort":
            client.flush_cache(timeout_s)
        elif mode == "retract":
            _flush_beside_retracted(client, _FLUSH_SHARE * timeout_s)
        elif not client.try_flush_cache():
            logger.warning(
                "engine %d at %s: requests are running, so prefixes computed with the old weights stay in its cache,"
                " for new requests too. Fix: --update-weight-pause-mode retract, or --sglang-disable-radix-cache.",
                client.endpoint.index,
                client.url,
            )

    def _on_all(self, action: Callable, phase: str) -> dict:
        tasks = {f"engine {c.endpoint.index} at {c.url}": lambda c=c: action(c) for c in self._clients}
        return run_together(tasks, timeout_s=self._order.timeout_s, who="trainer source 0", phase=phase)


def _flush_beside_retracted(client: EngineClient, deadline_s: float) -> None:
    try:
        client.flush_cache(deadline_s)
    except WaitTimeout as error:
        raise WeightSyncError(
            f"{error}. SGLang 0.5.17 does not flush while retracted requests wait. Fix: --update-weight-pause-mode"
            " abort."
        ) from error
