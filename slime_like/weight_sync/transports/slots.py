"""Two buckets of flat bytes: one is filled, while the tensors for it are gathered, as the other is sent."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from slime_like.errors import WaitTimeout
from slime_like.weight_sync.buckets import Cutter, NamedTensor, SentReport, num_bytes
from slime_like.weight_sync.device import on_this_device

#: Beyond the deadline that each send has by itself.
_GRACE_S = 5.0
#: The first bucket is small, so that engines have something to do soon; each of those that follow may be four times as
#: large, up to a slot.
_FIRST_BYTES = 8 << 20
#: Bytes that a slot may have beyond a bucket: for what a transport writes behind the tensors.
SLACK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class PlacedTensor:
    """One tensor of a bucket: bytes start to stop (exclusive)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    path: str = ""  # of another file in which it lies, not in the slot

    def row(self) -> list:
        """As shm_slots reads it."""
        row = [self.name, self.dtype, self.shape, self.start, self.stop]
        return [*row, self.path] if self.path else row


class BucketSlot:
    """Bytes of one bucket.

    Kept for the next one: memory that was never touched before costs more than copying into it.
    """

    def __init__(self, device: str | torch.device = "cpu"):
        self._device = torch.device(device)
        self._filled: torch.cuda.Event | None = None
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.entries: list[PlacedTensor] = []
        self.used = 0

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes; what is in it stays."""
        if size > self.memory.numel():
            grown = torch.empty(size, dtype=torch.uint8, device=self._device)
            grown[: self.used] = self.memory[: self.used]
            self.memory = grown

    def copies(self, tensor: torch.Tensor) -> bool:
        """Whether put() copies it."""
        return True

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in behind the others."""
        stop = self.used + num_bytes(tensor)
        self.reserve(stop)
        if stop > self.used:
            self.memory[self.used : stop].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._enter(name, tensor, self.used)
        self.used = stop

    def _enter(self, name: str, tensor: torch.Tensor, start: int, path: str = "") -> None:
        dtype, stop = str(tensor.dtype).removeprefix("torch."), start + num_bytes(tensor)
        self.entries.append(PlacedTensor(name, dtype, tuple(tensor.shape), start, stop, path))

    def append(self, data: bytes) -> int:
        """Write something behind the tensors that is not one; where it ends."""
        stop = self.used + len(data)
        self.reserve(stop)
        self.memory[self.used : stop] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return stop

    def seal(self) -> None:
        """Everything was put in by this thread: from now on others can wait until it is really there."""
        if self._device.type == "cuda":
            self._filled = torch.cuda.Event()
            self._filled.record(torch.cuda.current_stream(self._device))

    def wait_filled(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream wait for what was put in, and nothing else on the device; without one, this thread waits."""
        if self._filled is None:
            return
        if stream is None:
            self._filled.synchronize()
        else:
            stream.wait_event(self._filled)

    def filled(self) -> torch.Tensor:
        """[used] uint8."""
        return self.memory[: self.used]

    def clear(self, max_bytes: int) -> None:
        """Empty it; room for one tensor that was larger than a bucket is given back."""
        self.entries, self.used = [], 0
        if self.memory.numel() > max_bytes + SLACK_BYTES:
            self.shrink()

    def shrink(self) -> None:
        """Give the memory back."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)


@dataclasses.dataclass(frozen=True)
class Sending:
    """How buckets are sent.

    send(slot, number): called in a thread of its own, one after another; what it raises ends the sync.
    """

    send: Callable[[BucketSlot, int], None]
    max_bytes: int  # of one slot
    who: str
    timeout_s: float  # deadline of one send


def send_in_slots(tensors: Iterable[NamedTensor], slots: Sequence[BucketSlot], how: Sending) -> SentReport:
    """Fill the slots in turn with all tensors and send each. Raises what `send` raises, and what the stream does.

    Alive at a time are the two slots and the tensor that is being copied. Returns when the last bucket was sent.
    """
    return _Run(slots, how).all_of(tensors)


def slot_bytes(buffer_bytes: int) -> int:
    """Bytes of one slot, so that two slots and what is being gathered for them stay below two buckets of
    `buffer_bytes`.
    """
    return max(1, buffer_bytes // 2)


class _Run:
    """One send_in_slots."""

    def __init__(self, slots: Sequence[BucketSlot], how: Sending):
        self._how = how
        self._free: queue.SimpleQueue = queue.SimpleQueue()
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._copies = slots[0].copies
        for slot in slots:
            slot.clear(how.max_bytes)
            self._free.put(slot)

    def all_of(self, tensors: Iterable[NamedTensor]) -> SentReport:
        sender = threading.Thread(target=on_this_device(self._send_ready), name=f"{self._how.who}: send", daemon=True)
        sender.start()
        try:
            report = self._fill(tensors)
        finally:
            self._ready.put(None)
            sender.join(self._how.timeout_s + _GRACE_S)
        if self._failure is not None:
            raise self._failure
        if sender.is_alive():
            raise self._late()
        return report

    def _fill(self, tensors: Iterable[NamedTensor]) -> SentReport:
        cutter, count, size = Cutter(min(_FIRST_BYTES, self._how.max_bytes)), 0, 0
        slot: BucketSlot | None = None
        for name, tensor in tensors:
            if cutter.cuts_before(name, tensor, is_copied=self._copies(tensor)) and slot is not None:
                cutter.max_bytes = min(4 * cutter.max_bytes, self._how.max_bytes)
                self._hand_over(slot)
                slot = None
            if slot is None:
                slot = self._next_slot()
                if num_bytes(tensor) <= self._how.max_bytes:
                    slot.reserve(self._how.max_bytes)
            slot.put(name, tensor)
            count, size = count + 1, size + num_bytes(tensor)
            del tensor  # before the next one is gathered
        if slot is not None:
            self._hand_over(slot)
        return SentReport(count, size)

    def _hand_over(self, slot: BucketSlot) -> None:
        slot.seal()
        self._ready.put(slot)

    def _next_slot(self) -> BucketSlot:
        try:
            slot = self._free.get(timeout=self._how.timeout_s + _GRACE_S)
        except queue.Empty:
            raise self._late() from None
        if self._failure is not None:
            raise self._failure
        return slot

    def _late(self) -> WaitTimeout:
        return WaitTimeout(
            who=self._how.who,
            whom="its own sending thread",
            phase="weight sync",
            seconds=self._how.timeout_s,
            last="a bucket was handed over",
        )

    def _send_ready(self) -> None:
        number = 0
        while (slot := self._ready.get()) is not None:
            if self._failure is None:
                try:
                    self._how.send(slot, number)
                except BaseException as error:  # noqa: BLE001 - raised by whoever fills the slots
                    self._failure = error
            number += 1
            slot.clear(self._how.max_bytes)
            self._free.put(slot)
