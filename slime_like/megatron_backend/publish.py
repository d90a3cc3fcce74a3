"""Sends this trainer's weights to the engines: every pipeline stage at the same time, each from one source rank (to a disk: from several)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state

from slime_like.config.run import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.megatron_backend.hf_convert import hf_names, is_export_source, joins_export, num_export_ranks, rank_in_stage
from slime_like.records import DeltaCount, EngineEndpoint, SyncReceipt
from slime_like.sglang_backend.client import EngineClient
from slime_like.utils.net import address_of_interface, is_own_address, own_address, url_host
from slime_like.weight_sync.base import PublisherOptions, make_publisher
from slime_like.weight_sync.bounds import best_rate
from slime_like.weight_sync.receipt import Receipt, never_sent
from slime_like.weight_sync.sources import Sources
from slime_like.weight_sync.stream import Digest
from slime_like.weight_sync.transform import Made, WeightTransform

#: Digests are sums modulo 2^64, so stages and tensors can be added in any order.
_DIGEST_MODULUS = 1 << 64

#: Of one rank: tensors and bytes sent, digest, names that the source gathered, of deltas, the best rate, what the user's function made.
_StageReport = tuple[int, int, int, list[str], DeltaCount | None, float | None, Made | None]


def source_address(engine_urls: Sequence[str], master_address: str) -> str:
    """This machine's address for engines that have to connect to it: the one that the first engine on another machine sees.

    A run whose own processes are all on one machine knows itself by the loopback address (`master_address`), which means another
    machine to an engine elsewhere. Engines on this machine reach every address of it.
    """
    hosts = [url_host(url) for url in engine_urls]
    elsewhere = next((host for host in hosts if not is_own_address(host)), master_address)
    return own_address(elsewhere)


class WeightPublisher:
    """Keeps the connection to the engines between syncs.

    The source is the first rank of each stage. The ranks that share its matrices, and those that hold other experts, help to gather,
    and write a share of what was gathered with the disk transport; the others wait.
    """

    def __init__(self, config: RunConfig, endpoints: Sequence[EngineEndpoint], *, master_address: str):
        self.endpoints = tuple(endpoints)
        self.transport = config.sync.update_weight_transport or ("ipc" if config.placement.colocate else "broadcast")
        self._publisher = None
        self._receipt: Receipt | None = None
        self._best_rate: float | None = None  # bytes a second
        self._config = config
        self._transform = WeightTransform.of(config)
        self._is_source = is_export_source()
        who = f"trainer source {parallel_state.get_pipeline_model_parallel_rank()}"
        address = self._address(master_address)
        sources = self._make_sources(who, address)  # collective
        if not (self._is_source or (self.transport == "disk" and joins_export())):
            return
        self._publisher_options = options = self._options(address, sources)
        self._publisher = make_publisher(options)
        if self._is_source and config.sync.compares_digests:
            clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in self.endpoints]
            self._receipt = Receipt(config.model, clients, who)

    def _address(self, master_address: str) -> str:
        interface = self._config.sync.update_weight_interface
        return address_of_interface(interface) if interface else source_address([endpoint.url for endpoint in self.endpoints], master_address)

    def _options(self, address: str, sources: Sources | None) -> PublisherOptions:
        config = self._config
        directory = config.sync.update_weight_disk_dir
        if directory is None and config.observability.run_dir:
            directory = os.path.join(config.observability.run_dir, "weights")
        return PublisherOptions(
            transport=self.transport,
            endpoints=self.endpoints,
            source_index=parallel_state.get_pipeline_model_parallel_rank(),
            num_sources=parallel_state.get_pipeline_model_parallel_world_size(),
            buffer_bytes=config.sync.update_weight_buffer_size,
            timeout_s=config.sync.update_weight_timeout_s,
            directory=directory,
            address=address,
            interface=config.sync.update_weight_interface,
            sources=sources,
            writer_index=rank_in_stage(),
            num_writers=num_export_ranks(),
            keep_files=config.sync.update_weight_disk_keep_files,
            delta_encoding=config.sync.delta_encoding,
        )

    def _make_sources(self, who: str, address: str) -> Sources | None:
        """With several stages that send to engines themselves: what they know of each other, hosted by the first source."""
        if self.transport not in ("ipc", "broadcast") or parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return None
        timeout_s = self._config.sync.update_weight_timeout_s
        is_host = self._is_source and parallel_state.get_pipeline_model_parallel_rank() == 0
        sources = Sources(address, 0, is_host=True, who=who, timeout_s=timeout_s) if is_host else None
        told: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, (address, sources.port) if sources is not None else None)
        if sources is None and self._is_source:
            host, port = next(found for found in told if found is not None)
            sources = Sources(host, port, is_host=False, who=who, timeout_s=timeout_s)
        return sources

    def connect(self) -> None:
        """Join the engines, one stage after the other. Collective; raises on every rank if one fails."""
        publisher = self._publisher
        # One after another: an engine that began with one source's group would wait in it for an engine that began with another's.
        self._on_stages("connect", lambda: self._connect(publisher) if publisher else None, in_turn=True)

    def _connect(self, publisher) -> None:
        publisher.connect()
        if self._is_source:
            self._best_rate = best_rate(self._publisher_options)

    def send(self, version: int, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> SyncReceipt:
        """Send all weights as `version`; the receipt is the same on every rank. Collective; raises on every rank if one fails."""
        started = time.monotonic()
        publisher = self._publisher
        try:
            self._on_stages("begin", lambda: publisher.begin(version) if publisher else None)
            reports = self._on_stages("send", lambda: self._send_stage(version, weights()))
            self._check_names([name for report in reports for name in report[3]])
            if self._transform is not None:
                self._transform.check([report[6] for report in reports])
            self._on_stages("finish", lambda: publisher.finish(version) if publisher else None)
        except BaseException:
            if publisher is not None:
                publisher.abandon(version)
            raise
        seconds, total = time.monotonic() - started, sum(r[1] for r in reports)
        rates = [r[5] for r in reports if r[5] is not None]
        return SyncReceipt(
            version=version,
            transport=self.transport,
            num_tensors=sum(r[0] for r in reports),
            num_bytes=total,
            seconds=seconds,
            bound_share=total / max(rates) / seconds if rates else None,
            digest=f"{sum(r[2] for r in reports) % _DIGEST_MODULUS:016x}",
            delta=sum((r[4] for r in reports), start=DeltaCount()) if self.transport == "delta" else None,
        )

    def verify(self) -> tuple[int, int]:
        """Compare what the engines hold with what the last `send` sent. Collective; raises on every rank.

        Returns (engines that were compared, tensors of which it is not known where an engine keeps them). Raises WeightSyncError naming the
        engine and the first tensor that differs.
        """
        timeout_s = self._config.sync.update_weight_timeout_s
        receipt = self._receipt

        def compare() -> tuple | None:
            return None if receipt is None else (receipt.verify(timeout_s), receipt.parameters(), len(receipt.unknown))

        compared = self._on_stages("verify", compare, in_turn=True)
        if self._config.sync.verify_weight_sync == "full":
            known = {layout: set().union(*(parameters.get(layout, ()) for _, parameters, _ in compared)) for _, each, _ in compared for layout in each}
            self._on_stages("verify", lambda: None if receipt is None else never_sent(receipt, known, timeout_s), in_turn=True)
        return min((count for count, _, _ in compared), default=0), sum(unknown for _, _, unknown in compared)

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def remove_files(self) -> None:
        """Give shared memory back. Asks no engine, which may have ended; nothing can be sent afterwards."""
        if self.transport == "ipc":
            self.close()

    def _check_names(self, sent: list[str]) -> None:
        """Every tensor of the model once: a digest says nothing of one that was never sent. Raises WeightSyncError."""
        if self._receipt is None and not sent:
            return
        expected = hf_names(self._config.model)
        for problem, names in (("was not sent", expected - set(sent)), ("is not of this model", set(sent) - expected)):
            if names:
                raise WeightSyncError(f"weight sync ({self.transport}): {min(names)} {problem} ({len(names)} of {len(expected)} tensors)")
        if len(sent) != len(expected):
            raise WeightSyncError(f"weight sync ({self.transport}): {len(sent)} tensors were sent instead of {len(expected)}: some twice")

    def _send_stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> _StageReport | None:
        if self._publisher is None:
            for _ in weights:
                pass
            return None
        names: list[str] = []
        digest = Digest()
        try:
            report = self._publisher.send(self._watched(weights, names, digest), version, self._receipt)
        finally:
            # Also after a failure: the neighbours are inside the gathering of the next tensor and would wait for us.
            for _ in weights:
                pass
        stage, transform = parallel_state.get_pipeline_model_parallel_rank(), self._transform
        made = None if transform is None else transform.made(stage, is_source=self._is_source)
        return report.num_tensors, report.num_bytes, digest.value, names, report.delta, self._best_rate, made

    def _watched(self, weights: Iterator[tuple[str, torch.Tensor]], names: list[str], digest: Digest) -> Iterator[tuple[str, torch.Tensor]]:
        """What is to be sent: these tensors, or what the user's function makes of them; each is hashed once, for the receipt and the digest together.

        The source's names go to `names`, as they were gathered.
        """
        sent = _noting(weights, names) if self._is_source else weights
        if self._transform is not None:
            sent = self._transform.over(sent)
        if not self._is_source:
            yield from sent
            return
        receipt = self._receipt
        for name, tensor in sent if receipt is None else receipt.watching(sent):
            digest.add(name, tensor, None if receipt is None else receipt.content)
            yield name, tensor

    def _on_stages(self, what: str, act: Callable[[], tuple | None], *, in_turn: bool = False) -> list[tuple]:
        """Run `act` on the gathering ranks of all stages at the same time, or of one stage after another; the results of all ranks that gave one.

        No rank returns before all have done it. Raises on every rank if one fails.
        """
        error: BaseException | None = None
        result = None
        mine = parallel_state.get_pipeline_model_parallel_rank()
        for stage in range(parallel_state.get_pipeline_model_parallel_world_size()) if in_turn else (mine,):
            if joins_export() and mine == stage:
                try:
                    result = act()
                except Exception as raised:  # noqa: BLE001 - raised below, once every rank was told
                    error = raised
            if in_turn:
                torch.distributed.barrier()
        outcomes: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(outcomes, (result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        failed = [f"trainer rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if failed:
            raise WeightSyncError(f"weight sync ({self.transport}, {what}) failed on {'; '.join(failed)}")
        return [outcome for outcome, _ in outcomes if outcome is not None]


def _noting(weights: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; their names go to `names`."""
    for name, tensor in weights:
        names.append(name)
        yield name, tensor
