"""Weights over a process group of this source (rank 0) and all ranks of all engines: NCCL between GPUs, gloo without
CUDA.

Each bucket travels as one flat uint8 tensor, while the next one is gathered. Engines with our loader take in a stream
from all pipeline stages at once, in one request (in_engine/groups.py). Others get a request for every bucket, with the
names, types and shapes in it, and stages take turns (sources).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from slime_like.errors import EngineError, SlimeLikeError, WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.utils.net import interface_of, listen_at
from slime_like.weight_sync.buckets import NamedTensor, Proof, PublisherOptions, Reader, SentReport
from slime_like.weight_sync.group_abort import destroy_left_groups, leave_group
from slime_like.weight_sync.in_engine.devices import settle
from slime_like.weight_sync.in_engine.groups import END, GAVE_UP, OVER, STATUS_BYTES, store_of
from slime_like.weight_sync.stores import serve_store
from slime_like.weight_sync.together import run_together
from slime_like.weight_sync.transports.channel import LAST_WORDS_S, Channel, engine_name, takes_channels
from slime_like.weight_sync.transports.slots import BucketSlot, Sending, send_in_slots, slot_bytes

logger = logging.getLogger(__name__)

#: SGLang's name of "one flat uint8 tensor".
_FLAT = "flattened_bucket"
#: Without CUDA: larger ones gain nothing, and an engine needs memory for two.
_HOST_SLOT_BYTES = 32 << 20
#: How many of our deadlines torch's watchdog of an NCCL group waits.
_WATCHDOG_LATER = 3
#: After a failure: how long engines that are well may take to hear of it.
_GIVE_UP_S = 5.0


class BroadcastPublisher:
    """See the module. The group is made at the first use and kept."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._uses_channels = False  # whether all engines have our loader
        self._device = torch.device("cpu")
        self._stream_of_sends: torch.cuda.Stream | None = None  # beside that on which the next bucket is gathered
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._stream_of_sends = torch.cuda.Stream(self._device)
        self._slots = [BucketSlot(self._device), BucketSlot(self._device)]

    @property
    def _who(self) -> str:
        return f"trainer source {self._options.source_index}"

    @property
    def _link(self) -> Link:
        assert self._group is not None, "connected"
        return Link(self._group, self._group_name, self._device, self._stream_of_sends)

    def connect(self) -> None:
        """Join the group together with every engine.

        Raises EngineError as soon as one engine refuses, WaitTimeout naming the late ones.
        """
        if self._group is not None:
            return
        destroy_left_groups()
        options = self._options
        self._group_name = f"slime-like-{options.source_index}-{secrets.token_hex(4)}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        world_size = 1 + sum(endpoint.tp_size for endpoint in options.endpoints)
        listener = listen_at(options.address)
        port = listener.getsockname()[1]
        tasks: dict[str, Callable] = {}
        offset = 1
        for client in self._clients:
            tasks[engine_name(client)] = lambda client=client, offset=offset: client.init_weights_update_group(
                address=options.address, port=port, rank_offset=offset, world_size=world_size,
                group_name=self._group_name, backend=backend, timeout_s=options.timeout_s,
            )  # fmt: skip
            offset += client.endpoint.tp_size
        tasks["itself"] = lambda: _join_group(backend, listener, world_size, self._group_name, options.timeout_s)
        with listener, _gloo_interface(options.interface or interface_of(options.address)):
            self._uses_channels = all(takes_channels(client) for client in self._clients)
            self._group = run_together(
                tasks, timeout_s=options.timeout_s, who=self._who, phase="connect for weight sync"
            )["itself"]

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Broadcast bucket by bucket, one while the next is gathered."""
        self.connect()
        try:
            if self._uses_channels:
                return self._send_over_channel(tensors, version, proof)
            if self._options.sources is not None:
                self._options.sources.new_round()
            return send_in_slots(tensors, self._slots, self._sending(self._broadcast_in_turn, version))
        except BaseException:
            # The group may be in the middle of a broadcast for good: the next use makes a new one.
            leave_group(self._group, self._who, timeout_s=self._options.timeout_s)
            self._tell_engines_to_leave()
            self._group = None
            raise
        finally:
            if self._device.type == "cuda":  # training needs the memory
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

    def _sending(self, send: Callable[[BucketSlot, str], None], version: int) -> Sending:
        options = self._options
        # An engine has two buckets of every source.
        most = slot_bytes(options.buffer_bytes) * 2 // max(2, options.num_sources)
        return Sending(
            send=lambda slot, number: send(slot, f"broadcast bucket {number} of version {version}"),
            max_bytes=most if self._device.type == "cuda" else min(most, _HOST_SLOT_BYTES),
            who=self._who,
            timeout_s=options.timeout_s * (1 if options.sources is None else 2),
        )

    def _send_over_channel(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None) -> SentReport:
        with ProcessGroupChannel(self._options, self._clients, proof, self._link) as channel:
            report = send_in_slots(tensors, self._slots, self._sending(channel.load, version))
            channel.end()
        return report

    def _broadcast_in_turn(self, slot: BucketSlot, phase: str) -> None:
        sources = self._options.sources
        with contextlib.nullcontext() if sources is None else sources.turn(phase):
            self._broadcast(slot, phase)

    def _broadcast(self, slot: BucketSlot, phase: str) -> None:
        request = {
            "names": [entry.name for entry in slot.entries],
            "dtypes": [entry.dtype for entry in slot.entries],
            "shapes": [list(entry.shape) for entry in slot.entries],
            "group_name": self._group_name,
            "load_format": _FLAT,
            "timeout_s": self._options.timeout_s,
        }
        tasks: dict[str, Callable] = {
            engine_name(client): (lambda client=client: client.update_weights_from_distributed(**request))
            for client in self._clients
        }
        # The tensor is sent in a thread too: should an engine refuse the request, waiting for it to receive would last
        # until the deadline.
        tasks["itself"] = functools.partial(self._link.send, slot, slot.used)
        run_together(tasks, timeout_s=self._options.timeout_s, who=self._who, phase=phase)


@dataclasses.dataclass(frozen=True)
class Link:
    """A source's process group, and on a GPU the stream on which it sends.

    It is another one than that on which the next bucket is gathered, and only it is ever waited for.
    """

    group: dist.ProcessGroup
    name: str
    device: torch.device
    stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def on_stream(self, slot: BucketSlot | None = None) -> Iterator[None]:
        """Inside, this thread's work goes to our stream, behind what fills the slot; at the end it is done."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if slot is not None:
                slot.wait_filled(self.stream)
            yield
            settle(self.device)

    def send(self, slot: BucketSlot, size: int) -> None:
        """Broadcast the first `size` bytes of a slot."""
        with self.on_stream(slot):
            dist.broadcast(slot.memory[:size], src=0, group=self.group)

    def send_header(self, size: int, start: int, room: int) -> None:
        """See in_engine/groups.py."""
        with self.on_stream():
            header = torch.tensor([size, start, room], dtype=torch.int64).to(self.device)
            dist.broadcast(header, src=0, group=self.group)


class ProcessGroupChannel(Channel):
    """Buckets over the process group, in whose other ranks engines receive and load until the end
    (in_engine/groups.py).
    """

    def __init__(
        self,
        options: PublisherOptions,
        clients: Sequence[EngineClient],
        proof: Proof | None,
        link: Link,
    ):
        super().__init__(options, clients, proof)
        self._link = link
        self._everyone = ", ".join(engine_name(client) for client in clients)
        self._is_in_flight = False  # something that may wait for an engine for good
        self._all_answered = False
        self._readers = [(client.endpoint.index, rank) for client in clients for rank in range(client.endpoint.tp_size)]

    def __enter__(self) -> ProcessGroupChannel:
        try:
            self.start("group", self._link.name)
        except BaseException as error:
            self.fail(error)  # no engine was asked yet
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self.fail(error)
        try:
            if not self._is_in_flight and not self._all_answered:
                self.has_ended = True
                self._end(GAVE_UP, _GIVE_UP_S)
        except (SlimeLikeError, RuntimeError) as late:
            logger.warning("%s: engines were not told that this weight sync is over: %s", self.who, late)
        if not self._all_answered:  # engines look there while nothing comes
            store_of(self._link.group).set(OVER, f"{self.who}: {type(error).__name__}: {error}")

    def load(self, slot: BucketSlot, phase: str) -> None:
        """One bucket."""
        self._watch()
        digests = [] if self.proof is None else self.proof.entries([entry.name for entry in slot.entries])
        table = {"tensors": [entry.row() for entry in slot.entries], "digests": digests}
        start = slot.used

        def send() -> None:
            with self._link.on_stream(slot):  # it may become another memory, which is copied to
                stop = slot.append(json.dumps(table).encode())
            self._link.send_header(stop, start, slot.memory.numel())
            self._link.send(slot, stop)

        self._together(send, phase, self.options.timeout_s, self._watch)

    def end(self) -> None:
        """Everything was sent; hear of what was digested. Raises WeightSyncError with what an engine says."""
        self.has_ended = True
        answers = self._end(END, self.options.timeout_s)
        self.finish()
        for (engine, rank), answer in answers.items():
            if rank == 0 and self.options.source_index == 0:
                self._leave(engine, answer.get("left", ()))
            if "error" in answer:
                self.check()  # it may be another source's failure that the engine complains about
                raise WeightSyncError(
                    f"engine {engine}, rank {rank}: {answer['error']}. It may hold half of the weights."
                )
            if self.proof is not None:
                self.proof.heard(engine, rank, answer["digest"])

    def _leave(self, engine: int, names: Sequence[str]) -> None:
        """Tell an engine to leave groups of trainers that were lost, which only it knows of."""
        client = next(client for client in self._clients if client.endpoint.index == engine)
        for name in names:
            try:
                client.destroy_weights_update_group(name, timeout_s=min(10.0, self.options.timeout_s))
            except SlimeLikeError as error:  # or they were left already
                logger.info("%s: leaving the group of a trainer that was lost: %s", self.who, error)

    def _end(self, how: int, timeout_s: float) -> dict[Reader, dict]:
        statuses: list[torch.Tensor] = []

        def send() -> None:
            self._link.send_header(how, 0, 0)
            with self._link.on_stream():
                mine = torch.zeros(STATUS_BYTES, dtype=torch.uint8, device=self._link.device)
                gathered = [torch.empty_like(mine) for _ in range(1 + len(self._readers))]
                dist.all_gather(gathered, mine, group=self._link.group)
            statuses.extend(status.cpu() for status in gathered)

        self._together(send, "end weight sync", timeout_s, self._watch if how == END else self.check_engines)
        self._all_answered = True
        of_readers = zip(self._readers, statuses[1:], strict=True)
        return {reader: json.loads(bytes(status.numpy())) for reader, status in of_readers}

    def _together(self, act: Callable[[], None], phase: str, timeout_s: float, watch: Callable[[], None]) -> None:
        """In a thread: should an engine refuse or die, waiting for it to receive would last until the deadline."""
        self._is_in_flight = True
        try:
            run_together({self._everyone: act}, timeout_s=timeout_s, who=self.who, phase=phase, watch=watch)
        except RuntimeError as error:  # of the group, which knows no engines' names
            self._lost(f"the group with {self._everyone} is broken: {error}")
        self._is_in_flight = False

    def _watch(self) -> None:
        """Raise if waiting has become pointless."""
        store = store_of(self._link.group)
        if store.check([OVER]):
            self._lost(store.get(OVER).decode())
        self.check()

    def _lost(self, reason: str) -> NoReturn:
        """Raise what an engine's answer or another source says, which comes a little later and knows more.

        Otherwise this.
        """
        ends = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < ends and not (self._requests is not None and self._requests.is_done):
            if self.options.sources is not None:
                self.options.sources.check()
            time.sleep(0.05)
        if self._requests is not None:
            self._requests.check()
        raise EngineError(f"{self.who}: {reason}. Engines may hold half of the weights.")


def _join_group(
    backend: str, listener: socket.socket, world_size: int, group_name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Make the group as rank 0, whom others meet at `listener`, next to the trainer's own groups (init_process_group
    would make the default one).

    The engines do the same in sglang.srt.utils.common.init_custom_process_group (0.5.23), whose store prefix has to be
    matched.
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    # The watchdog of NCCL ends the process at the group's deadline: ours, which aborts the group only, must come first.
    timeout = datetime.timedelta(seconds=timeout_s * (_WATCHDOG_LATER if backend == "nccl" else 1))
    store = serve_store(listener, timeout_s=timeout_s, world_size=world_size)
    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        Backend(backend),
        PrefixStore(group_name, store),
        group_name=group_name,
        backend_options=None,
        timeout=timeout,
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
