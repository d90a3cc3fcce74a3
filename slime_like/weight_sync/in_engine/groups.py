"""Runs inside the engine: takes a stream of buckets (intake.py) from process groups, in each of which a trainer source
is rank 0.

For each bucket the source broadcasts a header of three numbers [bytes, where its table begins, what it has room for
itself] and then the bytes: the tensors, and behind them the table as JSON {"tensors": [[name, dtype, shape, start,
stop], …], "digests": [of each layout: [of each rank: entries of receipt.py, …], …]}. Instead of the bytes END or
GAVE_UP is the end; then all ranks tell each other how it went: STATUS_BYTES of JSON, {"error"} or {"digest", "left":
groups of trainers that are gone, which SGLang is to be told to leave}. While a bucket is loaded the next one comes in.
Nothing is raised and nothing lasts for good: when no end comes, the group's store says OVER.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import threading
import time
from collections.abc import Collection

from slime_like.weight_sync.group_abort import abort_group
from slime_like.weight_sync.in_engine import shm_slots
from slime_like.weight_sync.in_engine.devices import settle

#: In the header: the source has sent everything, or cannot.
END, GAVE_UP = 0, -1
#: Key in the group's store that says: this group stands still for good (gloo cannot be interrupted). Its value is the
#: reason.
OVER = "over"
#: How often a wait looks for it.
_LOOK_S = 0.5
#: Bytes in which a rank tells how it went.
STATUS_BYTES = 1024
#: Memory that is larger than what its source has by more than this is given back: it was for one large tensor.
_SLACK_BYTES = 1 << 20
#: So many names of groups that were left fit beside a status.
_MOST_LEFT = 8

#: How long the store of a group may take to answer, whose trainer may be gone.
_ANSWER_S = 1.0

#: Groups over gloo that weights came from: (store, threads that are in it). A trainer that is killed leaves its own
#: behind: 7 sockets.
_known: dict[str, tuple] = {}


def take_groups(loading, order: dict) -> None:
    """Load from all groups until each has ended. loading: intake.Loading; order: see intake.take.

    Raises where nobody can be told.
    """
    from torch.distributed import DistError

    device = next(loading.model.parameters()).device
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    me = f"engine {order['engine']}, rank {order['rank']}"
    sources = {name: _Source(name, device, arrived, me, order["timeout_s"]) for name in order["channels"]}
    if device.type == "cpu":
        _known.update({name: (store_of(source.group), source.threads) for name, source in sources.items()})
    failure = ""
    while any(source.is_open for source in sources.values()):
        try:
            name, bucket = _next(arrived, sources.values(), order["timeout_s"])
        except (TimeoutError, DistError):
            for source in sources.values():
                source.stop()
            return  # nobody is there to be told: sources wait no longer than we do
        if isinstance(bucket, str):
            sources[name].is_open = False
            failure = failure or bucket
            continue
        if not failure:  # after one, what still comes is let go: sources cannot be stopped in the middle
            try:
                _load(loading, order, name, *bucket)
            except Exception as error:  # noqa: BLE001 - told to every source
                failure = f"{type(error).__name__}: {error}"
        sources[name].free.put(bucket[0])
        del bucket  # its memory may be given up now
    left = [] if failure else _take_left(sources)
    telling = [
        source.tell(
            {"error": failure[: STATUS_BYTES // 2]} if failure else {"digest": loading.digest(name), "left": left}
        )
        for name, source in sources.items()
    ]
    deadline = time.monotonic() + order["timeout_s"]
    with contextlib.suppress(DistError):  # the trainer has died
        while (
            any(thread.is_alive() for thread in telling)
            and time.monotonic() < deadline
            and not any(source.is_over() for source in sources.values())
        ):
            for thread in telling:
                thread.join(_LOOK_S)
    if any(thread.is_alive() for thread in telling):
        for source in sources.values():
            source.stop()


def _take_left(used: Collection[str]) -> list[str]:
    """Names of groups whose trainer is gone, each once."""
    left = [
        name
        for name, (store, threads) in _known.items()
        if name not in used and not any(thread.is_alive() for thread in threads) and _is_gone(store)
    ][:_MOST_LEFT]
    for name in left:
        del _known[name]
    return left


def _is_gone(store) -> bool:
    """Whether nobody serves a store any more. In a thread: a machine that hangs never says so."""
    from torch.distributed import DistError

    gone = threading.Event()

    def ask() -> None:
        try:
            store.check([OVER])
        except DistError:
            gone.set()

    thread = threading.Thread(target=ask, name="weights: is it still there", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return gone.is_set()


def store_of(group):
    """The store through which the ranks of a group found each other."""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


def _next(arrived: queue.SimpleQueue, sources: Collection[_Source], timeout_s: float) -> tuple:
    """What has arrived. Raises TimeoutError if it is over, DistError if the trainer has died."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return arrived.get(timeout=_LOOK_S)
        except queue.Empty:
            if time.monotonic() > deadline or any(source.is_over() for source in sources):
                raise TimeoutError from None


def _load(loading, order: dict, channel: str, memory, size: int, start: int) -> None:
    table = json.loads(bytes(memory[start:size].cpu().numpy()))
    entries = [] if order["layout"] is None else table["digests"][order["layout"]][order["rank"]]
    loading.load(channel, shm_slots.views(memory, table["tensors"], start), entries)
    settle(memory.device)  # before the memory is written to again


class _Source:
    """One source's group, and the thread that receives from it into two memories in turn."""

    def __init__(self, name: str, device, arrived: queue.SimpleQueue, me: str, timeout_s: float):
        import torch
        from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout

        self.is_open = True
        self.free: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(2):
            self.free.put(torch.empty(0, dtype=torch.uint8, device=device))
        self._device, self._me = device, me
        #: of this source alone: what comes from one must never wait for what comes from another (devices.py)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # torch's own register of groups by name (2.6 to 2.13), as is store_of
        self.group = _resolve_process_group(name)
        self._store = store_of(self.group)  # which forgets it once the group is destroyed
        if device.type == "cpu":
            # A thread that waits in gloo cannot be interrupted, not even by destroying the group: it would keep its
            # memory for SGLang's half an hour.
            _set_pg_timeout(datetime.timedelta(seconds=timeout_s), self.group)
        self._broken = self._is_stopped = False
        receiving = threading.Thread(
            target=self._receive, args=(name, arrived), name=f"weights from {name}", daemon=True
        )
        self.threads = [receiving]
        receiving.start()

    def stop(self) -> None:
        """Take in no more, let go of the memory, and end what waits on the device for a source that never sends."""
        self._is_stopped = True
        self.free.put(None)  # should it be waiting there
        abort_group(self.group, self._me)

    def is_over(self) -> bool:
        """Whether its source has said that nothing more will come, in no other way than through the store."""
        return self._store.check([OVER])

    def tell(self, status: dict) -> threading.Thread:
        """How it went, to all ranks of the group, which do the same.

        In a thread: one of them may have died, which must not be our end too.
        """
        import torch
        import torch.distributed as dist

        text = json.dumps(status).encode().ljust(STATUS_BYTES)

        def gather() -> None:
            if not self._broken:
                with contextlib.suppress(RuntimeError):
                    self._use_device()
                    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
                    dist.all_gather([torch.empty_like(mine) for _ in range(self.group.size())], mine, group=self.group)

        thread = threading.Thread(target=gather, name="weights: how it went", daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def _receive(self, name: str, arrived: queue.SimpleQueue) -> None:
        """Puts (name, (memory, bytes, table's start)) for every bucket, then (name, "") or what went wrong."""
        import torch

        try:
            self._use_device()
            while True:
                size, start, room = self._header()
                if size <= 0:
                    break
                memory = self.free.get()
                if self._is_stopped:
                    return
                if not size <= memory.numel() <= room + _SLACK_BYTES:
                    memory = None  # not one more at a time than two
                    memory = torch.empty(max(size, room), dtype=torch.uint8, device=self._device)
                self._broadcast(memory[:size])
                arrived.put((name, (memory, size, start)))
        except Exception as error:  # noqa: BLE001 - handed to the thread that loads
            self._broken = True
            with contextlib.suppress(RuntimeError):  # the store is the source's
                self._store.compare_set(OVER, "", f"{self._me}: {type(error).__name__}: {error}")
            arrived.put((name, f"{type(error).__name__}: {error}"))
        else:
            arrived.put((name, "" if size == END else "a trainer source gave up"))

    def _use_device(self) -> None:
        import torch

        if self._stream is not None:  # which each thread chooses for itself
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)

    def _header(self) -> list[int]:
        import torch

        header = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._broadcast(header)
        return header.tolist()

    def _broadcast(self, tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self.group)
        settle(tensor.device)
