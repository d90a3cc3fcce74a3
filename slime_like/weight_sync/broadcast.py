"""Weights over a process group of this source (rank 0) and all ranks of all engines: NCCL between GPUs, gloo without CUDA.

Each bucket travels as one flat uint8 tensor, while a request tells every engine the names, types and shapes in it. The next one is
gathered meanwhile. Pipeline stages gather at the same time and take turns on the wire (turns.py).
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
from slime_like.weight_sync.slots import Sending, Slot, send_in_slots, slot_bytes
from slime_like.weight_sync.stream import NamedTensor, PublisherOptions, SentReport
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: SGLang's name of "one flat uint8 tensor".
_FLAT = "flattened_bucket"
#: Without CUDA: the engine takes fresh memory for each bucket, which is cheap only for small ones.
_HOST_SLOT_BYTES = 32 << 20


class BroadcastPublisher:
    """See the module. The group is made at the first use and kept."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._slots = [Slot(self._device), Slot(self._device)]

    @property
    def _who(self) -> str:
        return f"trainer source {self._options.source_index}"

    def connect(self) -> None:
        """Join the group together with every engine. Raises EngineError as soon as one engine refuses, WaitTimeout naming the late ones."""
        if self._group is not None:
            return
        options = self._options
        self._group_name = f"slime-like-{options.source_index}-{secrets.token_hex(4)}"
        backend = "nccl" if self._device == "cuda" else "gloo"
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
        with _gloo_interface(options.interface or interface_of(options.address)):
            self._group = run_together(tasks, timeout_s=options.timeout_s, who=self._who, phase="connect for weight sync")["itself"]

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Broadcast bucket by bucket, one while the next is gathered; several sources take turns."""
        self.connect()
        options = self._options
        if options.turns is not None:
            options.turns.new_round()
        how = Sending(
            send=lambda slot, number: self._broadcast_in_turn(slot, f"broadcast bucket {number} of version {version}"),
            max_bytes=slot_bytes(options.buffer_bytes) if self._device == "cuda" else min(slot_bytes(options.buffer_bytes), _HOST_SLOT_BYTES),
            who=self._who,
            timeout_s=options.timeout_s * (1 if options.turns is None else 2),
        )
        try:
            return send_in_slots(tensors, self._slots, how)
        finally:
            if self._device == "cuda":  # training needs the memory
                for slot in self._slots:
                    slot.shrink()

    def finish(self, version: int) -> None:
        """Nothing to do: engines have loaded what was sent."""

    def abandon(self, version: int) -> None:
        """Nothing to do: a group that failed was left already."""

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

    def _broadcast_in_turn(self, slot: Slot, phase: str) -> None:
        turns = self._options.turns
        with contextlib.nullcontext() if turns is None else turns.turn(phase):
            self._broadcast(slot, phase)

    def _broadcast(self, slot: Slot, phase: str) -> None:
        request = {
            "names": [entry.name for entry in slot.entries],
            "dtypes": [entry.dtype for entry in slot.entries],
            "shapes": [list(entry.shape) for entry in slot.entries],
            "group_name": self._group_name,
            "load_format": _FLAT,
            "timeout_s": self._options.timeout_s,
        }
        tasks: dict[str, Callable] = {self._name(client): (lambda client=client: client.update_weights_from_distributed(**request)) for client in self._clients}
        # The tensor is sent in a thread too: should an engine refuse the request, waiting for it to receive would last until the deadline.
        tasks["itself"] = functools.partial(_send_flat, slot.filled(), self._group)
        try:
            run_together(tasks, timeout_s=self._options.timeout_s, who=self._who, phase=phase)
        except BaseException:
            # The group may be in the middle of a broadcast for good: let go of it, so that the next use makes a new one.
            # It is not destroyed, because our own thread may still be waiting in it.
            self._tell_engines_to_leave()
            self._group = None
            raise


def _send_flat(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if flat.is_cuda:  # what fills it was queued on another thread's stream
        torch.cuda.synchronize(flat.device)
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
def _gloo_interface(name: str | None) -> Iterator[None]:
    """While the group is made, gloo uses this interface (it would take the one that the host's name resolves to).

    NCCL reads its variable once in a process: whoever starts the trainer sets it.
    """
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
