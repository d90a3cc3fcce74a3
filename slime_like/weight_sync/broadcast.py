"""Weights over a process group of this source (rank 0) and all ranks of all engines: NCCL between GPUs, gloo without CUDA.

Each bucket travels as one flat uint8 tensor, while a request tells every engine the names, types and shapes in it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from slime_like.errors import SlimeLikeError
from slime_like.sglang_backend.client import EngineClient
from slime_like.utils.net import free_port, host_port, interface_of
from slime_like.weight_sync.stream import Digest, NamedTensor, PublisherOptions, SentReport, buckets, raw_bytes
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: SGLang's name of "one flat uint8 tensor".
_FLAT = "flattened_bucket"


class BroadcastPublisher:
    """See the module. The group is made at the first use and kept."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    @property
    def _who(self) -> str:
        return f"trainer source {self._options.source_index}"

    def connect(self) -> None:
        """Join the group together with every engine. Raises EngineError as soon as one engine refuses, WaitTimeout naming the late ones."""
        if self._group is not None:
            return
        options = self._options
        self._group_name = f"slime-like-{options.source_index}-{secrets.token_hex(4)}"
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        port = free_port(options.address)
        world_size = 1 + sum(endpoint.tp_size for endpoint in options.endpoints)
        tasks: dict[str, Callable] = {}
        offset = 1
        for client in self._clients:
            tasks[self._name(client)] = lambda client=client, offset=offset: client.init_weights_update_group(
                address=options.address, port=port, rank_offset=offset, world_size=world_size,
                group_name=self._group_name, backend=backend, timeout_s=options.timeout_s,
            )  # fmt: skip
            offset += client.endpoint.tp_size
        tasks["itself"] = lambda: _join_group(backend, options.address, port, world_size, self._group_name, options.timeout_s)
        with _gloo_interface(options.address):
            self._group = run_together(tasks, timeout_s=options.timeout_s, who=self._who, phase="connect for weight sync")["itself"]

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Broadcast bucket by bucket."""
        self.connect()
        digest = Digest()
        for number, bucket in enumerate(buckets(tensors, self._options.buffer_bytes)):
            for name, tensor in bucket:
                digest.add(name, tensor)
            # Wide types first: the receiver makes views at byte offsets, which have to be multiples of the element size.
            bucket = sorted(bucket, key=lambda item: -item[1].element_size())
            self._broadcast(bucket, f"broadcast bucket {number} of version {version}")
        return digest.report()

    def close(self) -> None:
        """Leave the group; an engine that cannot be told any more is only logged."""
        if self._group is None:
            return
        self._tell_engines_to_leave()
        dist.destroy_process_group(self._group)
        self._group = None

    def _tell_engines_to_leave(self) -> None:
        for client in self._clients:
            try:
                client.destroy_weights_update_group(self._group_name, timeout_s=min(10.0, self._options.timeout_s))
            except SlimeLikeError as error:
                logger.warning("%s: leaving the weight sync group: %s", self._who, error)

    def _name(self, client: EngineClient) -> str:
        return f"engine {client.endpoint.index} at {client.url}"

    def _broadcast(self, bucket: list[NamedTensor], phase: str) -> None:
        flat = torch.cat([raw_bytes(tensor) for _, tensor in bucket])
        if torch.cuda.is_available():
            flat = flat.cuda()
        request = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "load_format": _FLAT,
            "timeout_s": self._options.timeout_s,
        }
        tasks: dict[str, Callable] = {self._name(client): (lambda client=client: client.update_weights_from_distributed(**request)) for client in self._clients}
        # The tensor is sent in a thread too: should an engine refuse the request, waiting for it to receive would last until the deadline.
        tasks["itself"] = functools.partial(_send_flat, flat, self._group)
        try:
            run_together(tasks, timeout_s=self._options.timeout_s, who=self._who, phase=phase)
        except BaseException:
            # The group may be in the middle of a broadcast for good: let go of it, so that the next use makes a new one.
            # It is not destroyed, because our own thread may still be waiting in it.
            self._tell_engines_to_leave()
            self._group = None
            raise


def _send_flat(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.broadcast(flat, src=0, group=group)
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _join_group(backend: str, address: str, port: int, world_size: int, group_name: str, timeout_s: float) -> dist.ProcessGroup:
    """Make the group as rank 0, next to the trainer's own groups (init_process_group would make the default one).

    The engines do the same in sglang.srt.utils.common.init_custom_process_group (0.5.23), whose store prefix has to be matched.
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous(f"tcp://{host_port(address, port)}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(group_name, store), group_name=group_name, backend_options=None, timeout=timeout
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


@contextlib.contextmanager
def _gloo_interface(address: str) -> Iterator[None]:
    """While the group is made, gloo uses the interface that holds `address` (it would take the one that the host's name resolves to)."""
    before, name = os.environ.get("GLOO_SOCKET_IFNAME"), interface_of(address)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
