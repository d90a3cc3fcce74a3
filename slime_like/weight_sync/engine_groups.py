"""Runs inside the engine: takes a stream of buckets (engine_stream) from process groups, in each of which a trainer source is rank 0.

For each bucket the source broadcasts a header of two numbers [bytes, where its table begins] and then the bytes: the tensors, and behind them the
table as JSON {"tensors": [[name, dtype, shape, start, stop], …], "digests": [of each layout: [of each rank: entries of engine_receipt, …], …]}.
Instead of the bytes END or GAVE_UP is the end; then all ranks tell each other how it went (STATUS_BYTES of JSON, {"digest"} or {"error"}).
While a bucket is loaded the next one comes in.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Collection

from slime_like.weight_sync import shm_slots

#: In the header: the source has sent everything, or cannot.
END, GAVE_UP = 0, -1
#: Key in the group's store that says: this group stands still for good (gloo cannot be interrupted).
OVER = "over"
#: How often a wait looks for it.
_LOOK_S = 0.5
#: Bytes in which a rank tells how it went.
STATUS_BYTES = 1024


def take_groups(loading, told: dict) -> None:
    """Load from all groups until each has ended. loading: engine_stream.Loading; told: see engine_stream.take. Raises where nobody can be told."""
    from torch.distributed import DistError

    device = next(loading.model.parameters()).device
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    sources = {name: _Source(name, device, arrived) for name in told["channels"]}
    failure = ""
    while any(source.is_open for source in sources.values()):
        try:
            name, bucket = _next(arrived, sources.values(), told["timeout_s"])
        except (TimeoutError, DistError):
            return  # nobody is there to be told: sources wait no longer than we do
        if isinstance(bucket, str):
            sources[name].is_open = False
            failure = failure or bucket
            continue
        if not failure:  # after one, what still comes is let go: sources cannot be stopped in the middle
            try:
                _load(loading, told, name, *bucket)
            except Exception as error:  # noqa: BLE001 - told to every source
                failure = f"{type(error).__name__}: {error}"
        sources[name].free.put(bucket[0])
        del bucket  # its memory may be given up now
    for name, source in sources.items():
        source.tell({"error": failure[: STATUS_BYTES // 2]} if failure else {"digest": loading.digest(name)})


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


def _load(loading, told: dict, channel: str, memory, size: int, start: int) -> None:
    import torch

    table = json.loads(bytes(memory[start:size].cpu().numpy()))
    entries = [] if told["layout"] is None else table["digests"][told["layout"]][told["rank"]]
    loading.load(channel, shm_slots.views(memory, table["tensors"], start), entries)
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)  # before the memory is written to again


class _Source:
    """One source's group, and the thread that receives from it into two memories in turn."""

    def __init__(self, name: str, device, arrived: queue.SimpleQueue):
        import torch
        from torch.distributed.distributed_c10d import _resolve_process_group

        self.is_open = True
        self.free: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(2):
            self.free.put(torch.empty(0, dtype=torch.uint8, device=device))
        self._device = device
        self._group = _resolve_process_group(name)  # torch's own register of groups by name (2.6 to 2.13), as is store_of
        self._broken = False
        threading.Thread(target=self._receive, args=(name, arrived), name=f"weights from {name}", daemon=True).start()

    def is_over(self) -> bool:
        """Whether its source has said that nothing more will come, in no other way than through the store."""
        return store_of(self._group).check([OVER])

    def tell(self, status: dict) -> None:
        """How it went, to all ranks of the group, which do the same."""
        import torch
        import torch.distributed as dist

        if self._broken:
            return
        text = json.dumps(status).encode().ljust(STATUS_BYTES)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        dist.all_gather([torch.empty_like(mine) for _ in range(self._group.size())], mine, group=self._group)

    def _receive(self, name: str, arrived: queue.SimpleQueue) -> None:
        """Puts (name, (memory, bytes, table's start)) for every bucket, then (name, "") or what went wrong."""
        import torch

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while True:
                size, start = self._header()
                if size <= 0:
                    break
                memory = self.free.get()
                if memory.numel() < size:
                    memory = None  # not one more at a time than two
                    memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._broadcast(memory[:size])
                arrived.put((name, (memory, size, start)))
        except Exception as error:  # noqa: BLE001 - handed to the thread that loads
            self._broken = True
            arrived.put((name, f"{type(error).__name__}: {error}"))
        else:
            arrived.put((name, "" if size == END else "a trainer source gave up"))

    def _header(self) -> list[int]:
        import torch

        header = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._broadcast(header)
        return header.tolist()

    def _broadcast(self, tensor) -> None:
        import torch
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self._group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
