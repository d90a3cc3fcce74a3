"""One trainer rank's part of every sync: its publisher, digests of what it sends, and the proof.

What a session drives (session.Ranks).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from slime_like.config.quantisation import scheme_of
from slime_like.config.run import RunConfig
from slime_like.config.transports import transport_of
from slime_like.errors import WeightSyncError
from slime_like.records import DeltaCount, EngineEndpoint, SyncReceipt, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.utils.net import address_of_interface, is_own_address, own_address, url_host
from slime_like.weight_sync.bounds import best_rate
from slime_like.weight_sync.buckets import Digest, NamedTensor, PublisherOptions, Reader, Redirects, WeightPublisher
from slime_like.weight_sync.fake_quantise import over_linear
from slime_like.weight_sync.proof.receipt import Receipt, never_sent, raise_different
from slime_like.weight_sync.quantise import Quantiser
from slime_like.weight_sync.ranks import RankGroup, RankPlace
from slime_like.weight_sync.session import PublishOrder
from slime_like.weight_sync.shared_weights import SharedWeights
from slime_like.weight_sync.transform import TransformOutcome, WeightTransform
from slime_like.weight_sync.transports.registry import make_publisher
from slime_like.weight_sync.transports.sources import Sources

logger = logging.getLogger(__name__)

#: Digests are sums modulo 2^64, so stages and tensors can be added in any order.
_DIGEST_MODULUS = 1 << 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """What a rank's source has to send. tensors: gathers them anew, under their HF names, collectively over the
    source's gatherers: its pipeline stage's, or with PublishOrder.cards everything.

    names: of the whole model, or of all its adapters. master_address: of the trainer's first rank, as the other ranks
    know it. adapter_config: PEFT's, where adapters are sent. shared: memory that engines map, in which tensors may lie.
    """

    place: RankPlace
    tensors: Callable[[], Iterator[NamedTensor]]
    names: frozenset[str]
    master_address: str
    adapter_config: dict | None = None
    shared: SharedWeights | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank sent. names: of the tensors that a source gathered. transformed: what the user's function made."""

    source: int
    num_tensors: int
    num_bytes: int
    digest: int
    names: list[str]
    delta: DeltaCount | None
    best_rate: float | None  # bytes a second
    transformed: TransformOutcome | None


class WeightSender:
    """Keeps the connection to the engines of one route between syncs.

    The source is the first rank of each stage. The ranks that share its matrices, and those that hold other experts,
    help to gather, and write a share of what was gathered where the transport has them; the others wait. With
    PublishOrder.cards all ranks gather everything, and each whose card has ranks of engines sends it to them.
    """

    def __init__(self, config: RunConfig, order: PublishOrder, gathering: Gathering):
        self.route = order.route
        self.is_connected = False
        self._config, self._gathering = config, gathering
        self._transport = transport_of(order.transport)
        self._group = RankGroup(gathering.place, order.transport)
        self._publisher: WeightPublisher | None = None
        self._receipt: Receipt | None = None
        self._transform = WeightTransform.of(config)
        self._int4_group_size = config.optimizer.int4_group_size
        scheme = scheme_of(config.sync.rollout_quantization)
        self._quantiser = None if scheme is None else Quantiser(scheme, gathering.names)
        self._whole: set[str] = set()  # URLs of engines of which it is known that all they hold was sent
        self._best_rate: float | None = None

    @property
    def _place(self) -> RankPlace:
        return self._gathering.place

    @property
    def _who(self) -> str:
        return f"trainer source {self._place.source}"

    @property
    def _sends(self) -> bool:
        """Whether this rank has a publisher: not all have somebody to send to."""
        place, cards = self._place, self.route.cards
        if self._transport.every_gatherer_writes:
            return True
        return place.is_source and (not cards or place.is_lead or any(place.source in ranks for ranks in cards))

    def redirect(self, order: PublishOrder) -> bool:
        """Go on with the engines of another order, and whether that is possible: with a transport that has no
        connection to make anew. What it sent last stays known.
        """
        same_way = dataclasses.replace(order.route, endpoints=self.route.endpoints) == self.route
        if not (self._transport.redirects and same_way and self.is_connected):
            return False
        self.route = order.route
        publisher = self._publisher
        if publisher is not None:
            assert isinstance(publisher, Redirects), "its row says so"
            publisher.redirect(order.endpoints)
            self._watch_digests(self._options(None))
        return True

    # ------------------------------------------------------------------ what a session asks for

    def on_lead(self, phase: str, act: Callable[[], None], *, longest_s: float) -> None:
        """See session.Ranks, as of the three below."""
        self._group.on_lead(phase, act, longest_s=longest_s)

    def connect(self) -> None:
        """Join the engines, one source after the other."""
        if self.is_connected:
            return
        hosted: list[tuple[str, int, Sources]] = []  # on the lead: kept for its own options

        def host() -> tuple[str, int] | None:
            if not (self._place.is_lead and self._transport.sources_meet and self._place.num_sources > 1):
                return None
            address = self._address()
            sources = Sources(address, 0, is_host=True, who=self._who, timeout_s=self.route.timeout_s)
            hosted.append((address, sources.port, sources))
            return address, sources.port

        meeting = self._group.on_gatherers("connect", host)

        def connect() -> None:
            if not self._sends:
                return
            sources = hosted[0][2] if hosted else None
            if sources is None and meeting and self._place.is_source:
                address, port = meeting[0]
                sources = Sources(address, port, is_host=False, who=self._who, timeout_s=self.route.timeout_s)
            self._connect(self._options(sources))

        # One after another: an engine that began with one source's group would wait in it for an engine that began
        # with another's.
        self._group.on_gatherers("connect", connect, in_turn=True)
        self.is_connected = True

    def send(self, weights: WeightsRef) -> SyncReceipt:
        """Every source sends what it gathered; the receipt is the same on every rank."""
        started, version, publisher = time.monotonic(), weights.version, self._publisher
        try:
            self._group.on_gatherers("begin", lambda: publisher.begin(version) if publisher else None)
            reports: list[_Report] = self._group.on_gatherers("send", lambda: self._send_all(version))
            if self._transform is not None:
                self._transform.check([report.transformed for report in reports if report.transformed is not None])
            reports = self._once(reports)
            self._group.on_gatherers("finish", lambda: publisher.finish(version) if publisher else None)
        except BaseException:
            if publisher is not None:
                publisher.abandon(version)
            raise
        seconds, total = time.monotonic() - started, sum(report.num_bytes for report in reports)
        rates = [report.best_rate for report in reports if report.best_rate is not None]
        deltas = [report.delta for report in reports if report.delta is not None]
        return SyncReceipt(
            weights=weights,
            transport=self._transport.name,
            num_tensors=sum(report.num_tensors for report in reports),
            num_bytes=total,
            seconds=seconds,
            bound_share=total / max(rates) / seconds if rates else None,
            digest=f"{sum(report.digest for report in reports) % _DIGEST_MODULUS:016x}",
            delta=sum(deltas, start=DeltaCount()) if deltas else None,
        )

    def prove(self, endpoints: Sequence[EngineEndpoint]) -> tuple[int, int]:
        """Compare what these engines hold with what the last `send` sent.

        Raises WeightSyncError naming the engine and the first tensor that differs.
        """
        timeout_s, receipt = self.route.timeout_s, self._receipt
        engines = frozenset(endpoint.index for endpoint in endpoints)

        def compare() -> tuple | None:
            if receipt is None:
                return None
            return receipt.differences(timeout_s, engines), receipt.readers(), receipt.parameters(), receipt.unknown

        compared = self._group.on_gatherers("verify", compare, in_turn=True)
        # Of all sources together, so that every rank says the same: which engines are wrong.
        raise_different([difference for differences, *_ in compared for difference in differences])
        # Engines that are sent eight bits start with made-up weights: what is never sent would be served.
        starting = {endpoint.url for endpoint in endpoints} - self._whole if self._quantiser is not None else set()
        if self.route.finds_unsent or starting:
            layouts = {layout for _, _, parameters, _ in compared for layout in parameters}
            sent = {
                layout: set().union(*(parameters.get(layout, ()) for _, _, parameters, _ in compared))
                for layout in layouts
            }
            self._group.on_gatherers(
                "verify",
                lambda: None if receipt is None else never_sent(receipt, sent, timeout_s, engines),
                in_turn=True,
            )
        self._whole |= starting
        every = [readers for _, readers, _, _ in compared]
        # A rank of an engine is proven by whoever sent to it: every stage, or the one trainer rank on its card.
        proven = set[Reader]() if not every else (set.union if self.route.cards else set.intersection)(*every)
        num_engines = sum(
            all((endpoint.index, rank) in proven for rank in range(endpoint.tp_size)) for endpoint in endpoints
        )
        return num_engines, len({name for _, _, _, unknown in compared for name in unknown})

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self.is_connected = False

    def remove_files(self) -> None:
        """Give back what would outlive this process.

        Asks no engine, which may have ended; nothing can be sent afterwards.
        """
        if self._transport.files_outlive_a_kill:
            self.close()

    # ------------------------------------------------------------------ inside

    def _address(self) -> str:
        interface = self._config.sync.update_weight_interface
        if interface:
            return address_of_interface(interface)
        return source_address([endpoint.url for endpoint in self.route.endpoints], self._gathering.master_address)

    def _options(self, sources: Sources | None) -> PublisherOptions:
        sync, place = self._config.sync, self._place
        return PublisherOptions(
            transport=self._transport.name,
            endpoints=self.route.endpoints,
            source_index=place.source,
            num_sources=place.num_sources,
            cards=self.route.cards,
            buffer_bytes=sync.update_weight_buffer_size,
            timeout_s=self.route.timeout_s,
            directory=self.route.directory,
            address=self._address(),
            interface=sync.update_weight_interface,
            sources=sources,
            writer_index=place.rank_in_source,
            num_writers=place.num_gatherers,
            keep_files=sync.update_weight_disk_keep_files,
            delta_encoding=sync.delta_encoding,
            adapter_config=self._gathering.adapter_config,
            shared=self._gathering.shared,
        )

    def _connect(self, options: PublisherOptions) -> None:
        self._publisher = make_publisher(options)
        self._watch_digests(options)
        self._publisher.connect()
        if self._place.is_source:
            self._best_rate = best_rate(options)

    def _watch_digests(self, options: PublisherOptions) -> None:
        """What is sent from now on is compared with what these engines hold."""
        if self._place.is_source and self.route.compares_digests:
            clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
            scheme = None if self._quantiser is None else self._quantiser.scheme
            self._receipt = Receipt(self._config.model, clients, self._who, options.readers, scheme=scheme)

    def _once(self, reports: list[_Report]) -> list[_Report]:
        """Those that together are the model once. Raises WeightSyncError where a tensor is missing or too many."""
        if not self.route.cards:
            self._check_names([name for report in reports for name in report.names])
            return reports
        first = reports[0]
        for report in reports:
            self._check_names(report.names)
            if report.digest != first.digest:
                logger.warning(
                    "trainer ranks %d and %d hold different weights (digests %016x and %016x), and so do the engines on"
                    " their cards: what data or tensor parallel ranks each hold a copy of has drifted apart",
                    first.source, report.source, first.digest, report.digest,
                )  # fmt: skip
        return [first]

    def _check_names(self, sent: list[str]) -> None:
        """Every tensor of the model once: a digest says nothing of one that was never sent. Raises WeightSyncError."""
        names, where = self._gathering.names, f"weight sync ({self._transport.name})"
        for problem, wrong in (("was not sent", names - set(sent)), ("is not of this model", set(sent) - names)):
            if wrong:
                raise WeightSyncError(f"{where}: {min(wrong)} {problem} ({len(wrong)} of {len(names)} tensors)")
        if len(sent) != len(names):
            raise WeightSyncError(f"{where}: {len(sent)} tensors were sent instead of {len(names)}: some twice")

    def _send_all(self, version: int) -> _Report | None:
        tensors = self._gathering.tensors()
        if self._publisher is None:
            for _ in tensors:
                pass
            return None
        names: list[str] = []
        digest = Digest()
        try:
            report = self._publisher.send(self._watched(tensors, names, digest), version, self._receipt)
        finally:
            # Also after a failure: the neighbours are inside the gathering of the next tensor and would wait for us.
            for _ in tensors:
                pass
        transform, place = self._transform, self._place
        # With cards everyone makes the same of the same tensors; the lead says what it is called.
        stage, says = (0, place.is_lead) if self.route.cards else (place.source, place.is_source)
        return _Report(
            source=place.source,
            num_tensors=report.num_tensors,
            num_bytes=report.num_bytes,
            digest=digest.value,
            names=names,
            delta=report.delta,
            best_rate=self._best_rate,
            transformed=None if transform is None else transform.outcome(stage, is_source=says),
        )

    def _watched(self, tensors: Iterator[NamedTensor], names: list[str], digest: Digest) -> Iterator[NamedTensor]:
        """What is to be sent: these tensors, or what the user's function makes of them, and of that eight bits; each is
        hashed once, for the receipt and the digest together. The source's names go to `names`, as they were gathered.
        """
        sent = _noting(tensors, names) if self._place.is_source else tensors
        if self._transform is not None:
            sent = self._transform.over(sent)
        if self._int4_group_size is not None:
            sent = over_linear(sent, self._int4_group_size)
        if self._quantiser is not None:
            sent = self._quantiser.over(sent)
        if not self._place.is_source:
            yield from sent
            return
        receipt = self._receipt
        for name, tensor in sent if receipt is None else receipt.watching(sent):
            digest.add(name, tensor, None if receipt is None else receipt.content)
            yield name, tensor


def source_address(engine_urls: Sequence[str], master_address: str) -> str:
    """This machine's address for engines that have to connect to it: the one that the first engine on another machine
    sees.

    A run whose own processes are all on one machine knows itself by the loopback address (`master_address`), which
    means another machine to an engine elsewhere. Engines on this machine reach every address of it.
    """
    hosts = [url_host(url) for url in engine_urls]
    elsewhere = next((host for host in hosts if not is_own_address(host)), master_address)
    return own_address(elsewhere)


def _noting(tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; their names go to `names`."""
    for name, tensor in tensors:
        names.append(name)
        yield name, tensor
