"""A model's calls in the order of their seq_id, whatever order they come in."""

from __future__ import annotations

import time

from slime_like.tinker.execution.entries import Entry
from slime_like.tinker.records import ModelSpec


class ModelQueue:
    """What of a model is done, and what waits. Call 0 is its creation."""

    def __init__(self, spec: ModelSpec, session_id: str, *, done_seq: int, snapshot_seq: int, snapshot: str | None):
        self.spec, self.session_id = spec, session_id
        self.done_seq = done_seq  # every call up to it has its answer on disk, or was given up
        self.executed_seq = done_seq  # every call up to it was executed: its answer may still be on its way to the disk
        self.snapshot, self.snapshot_seq = snapshot, snapshot_seq
        self.stepped_seq = snapshot_seq  # the last call that changed weights: what a snapshot taken now would hold
        self.steps_since_snapshot = 0
        self.snapshot_took_s = 0.0
        self.snapshot_time = self.last_used = time.monotonic()
        self.waiting: dict[int, Entry] = {}
        self.highest_seq = done_seq
        self.has_ended = False  # it takes no more calls

    @property
    def model_id(self) -> str:
        """The model's."""
        return self.spec.model_id

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are trained, not adapters."""
        return self.spec.lora_rank == 0

    def add(self, entry: Entry) -> None:
        """A call that waits from now on."""
        self.waiting[entry.seq_id] = entry
        self.highest_seq = max(self.highest_seq, entry.seq_id)

    def next(self) -> Entry | None:
        """The call that may run: all before it were executed."""
        return self.waiting.get(self.executed_seq + 1)

    def done(self, seq_id: int) -> None:
        """The call has its answer."""
        self.waiting.pop(seq_id, None)
        self.done_seq = max(self.done_seq, seq_id)
        self.executed_seq = max(self.executed_seq, seq_id)

    def missing(self) -> int | None:
        """The seq_id that calls here wait for and that has not come; None: there is no such."""
        seq = self.executed_seq + 1
        return seq if seq not in self.waiting and any(later > seq for later in self.waiting) else None

    def beyond_gap(self) -> list[Entry]:
        """The calls that directly follow the missing ones, up to the next gap, in order."""
        if self.missing() is None:
            return []
        seq = min(later for later in self.waiting if later > self.executed_seq)
        run = []
        while seq in self.waiting:
            run.append(self.waiting[seq])
            seq += 1
        return run
