"""Sends this trainer's weights to the engines: every pipeline stage in turn, each from one source rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state

from slime_like.config.run import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.megatron_backend.hf_convert import is_export_source, joins_export
from slime_like.records import EngineEndpoint, SyncReceipt
from slime_like.utils.net import is_own_address, own_address, url_host
from slime_like.weight_sync.base import PublisherOptions, make_publisher

#: Digests are sums modulo 2^64, so stages and tensors can be added in any order.
_DIGEST_MODULUS = 1 << 64


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

    The source is the first rank of each stage. The ranks that share its matrices, and those that hold other experts, only help to
    gather; the others wait.
    """

    def __init__(self, config: RunConfig, endpoints: Sequence[EngineEndpoint], *, master_address: str):
        self.endpoints = tuple(endpoints)
        self.transport = config.sync.update_weight_transport or ("ipc" if config.placement.colocate else "broadcast")
        self._publisher = None
        if not is_export_source():
            return
        directory = config.sync.update_weight_disk_dir
        if directory is None and config.observability.run_dir:
            directory = os.path.join(config.observability.run_dir, "weights")
        options = PublisherOptions(
            transport=self.transport,
            endpoints=self.endpoints,
            source_index=parallel_state.get_pipeline_model_parallel_rank(),
            num_sources=parallel_state.get_pipeline_model_parallel_world_size(),
            buffer_bytes=config.sync.update_weight_buffer_size,
            timeout_s=config.sync.update_weight_timeout_s,
            directory=directory,
            address=source_address([endpoint.url for endpoint in self.endpoints], master_address),
        )
        self._publisher = make_publisher(options)

    def connect(self) -> None:
        """Join the engines, one stage after the other. Collective; raises on every rank if one fails."""
        self._each_stage("connect", lambda: self._publisher.connect() if self._publisher else None)

    def send(self, version: int, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> SyncReceipt:
        """Send all weights as `version`; the receipt is the same on every rank. Collective; raises on every rank if one fails."""
        started = time.monotonic()
        reports = self._each_stage("send", lambda: self._send_stage(version, weights()))
        return SyncReceipt(
            version=version,
            transport=self.transport,
            num_tensors=sum(r[0] for r in reports),
            num_bytes=sum(r[1] for r in reports),
            seconds=time.monotonic() - started,
            digest=f"{sum(r[2] for r in reports) % _DIGEST_MODULUS:016x}",
        )

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _send_stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[int, int, int] | None:
        if self._publisher is None:
            for _ in weights:
                pass
            return None
        try:
            report = self._publisher.send(weights, version)
        finally:
            # Also after a failure: the neighbours are inside the gathering of the next tensor and would wait for us.
            for _ in weights:
                pass
        return report.num_tensors, report.num_bytes, report.digest

    def _each_stage(self, what: str, act: Callable[[], tuple | None]) -> list[tuple]:
        """Run `act` on the gathering ranks of one stage after another; the results of all ranks that gave one."""
        error: BaseException | None = None
        result = None
        for stage in range(parallel_state.get_pipeline_model_parallel_world_size()):
            if joins_export() and parallel_state.get_pipeline_model_parallel_rank() == stage:
                try:
                    result = act()
                except Exception as raised:  # noqa: BLE001 - raised below, once every rank was told
                    error = raised
            torch.distributed.barrier()
        outcomes: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(outcomes, (result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        failed = [f"trainer rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if failed:
            raise WeightSyncError(f"weight sync ({self.transport}, {what}) failed on {'; '.join(failed)}")
        return [outcome for outcome, _ in outcomes if outcome is not None]
