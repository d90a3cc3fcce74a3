"""A checkpoint that is written by a thread of each rank, and made the latest when all are done: while training goes
on, from a copy, or waited for.

Megatron's own callers do not serve here (0.16.1): the forking one would leave the results of the write in the child and
may deadlock beside gloo's threads, the persistent one dies without CUDA (`rank % device_count`). A thread needs
neither: writing files lets other threads run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from slime_like.errors import SaveError, WaitTimeout
from slime_like.megatron_backend.checkpoint.folder import Draft, shard_digests
from slime_like.megatron_backend.checkpoint.state import WRITE_FAILURES, TrainState, finish_writing, start_writing

#: How long the result of an ended thread may take to arrive: none, but where Megatron's queue lives in another process.
_RESULT_S = 10.0


class PendingSave:
    """One checkpoint being written.

    Until finish() says True the checkpoint before it is the latest, whatever happens.
    """

    def __init__(self, draft: Draft, state: TrainState, *, seconds: float, copies: bool = True):
        """Start to write the state, or, copies, a copy of it. Collective. seconds: how long finish() waits at most.

        Raises SaveError.
        """
        self._draft, self._seconds, self._copies = draft, seconds, copies
        self._thread: threading.Thread | None = None  # none where this rank has nothing to write
        self._results: Any = None  # Megatron's queue for what the thread found
        self._digests: dict[str, str] = {}  # of what the thread has written
        self._unreadable: str | None = None
        self._who = f"trainer rank {torch.distributed.get_rank()}"
        try:
            request = start_writing(draft, state)
            self._finalize = request.finalize_fns
            self._start(request)
        except SaveError:  # every rank has it
            self._discard()
            raise
        except WRITE_FAILURES as error:
            self._discard()
            raise self._failure(error) from error

    @property
    def path(self) -> str:
        """Where the checkpoint will lie."""
        return self._draft.final_path

    def finish(self, *, wait: bool) -> bool:
        """Make the checkpoint the latest if every rank has written its part; False: not yet. Collective.

        Raises SaveError on every rank if one could not write, WaitTimeout if, with wait, this one does not end. After
        a SaveError nothing is left of it.
        """
        started = time.monotonic()
        if wait and self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                seconds = time.monotonic() - started
                raise WaitTimeout(
                    who=self._who,
                    whom=f"its write to {self._draft.path}",
                    phase="save",
                    seconds=seconds,
                    last="still writing",
                )
        states: list = [None] * torch.distributed.get_world_size()
        is_writing = self._thread is not None and self._thread.is_alive()
        torch.distributed.all_gather_object(states, (is_writing, None if is_writing else self._write_error()))
        if any(is_writing for is_writing, _ in states):
            return False
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(states) if error]
        try:
            if errors:  # Megatron would tell only rank 0 what happened
                raise SaveError(
                    f"{self._draft.what} could not be written by {len(errors)} of {len(states)} ranks."
                    f" {'; '.join(errors)}"
                )
            self._publish()
        except SaveError:
            self._discard()
            raise
        return True

    def _publish(self) -> None:
        try:
            if torch.distributed.get_rank() == 0:
                self._draft.release_room()
            for function in self._finalize:
                function()
        except WRITE_FAILURES as error:
            raise self._failure(error) from error
        finish_writing(self._draft, self._digests)

    def _discard(self) -> None:
        if torch.distributed.get_rank() == 0:
            self._draft.discard()

    def _start(self, request: AsyncRequest) -> None:
        if request.async_fn is None:  # this rank has nothing to write
            return
        _, buckets, self._results = arguments = list(request.async_fn_args)
        staged = request.preload_fn() if request.preload_fn is not None else buckets
        # In place: Megatron counts the buckets in the end, and its own references would keep a second copy alive.
        if self._copies:
            buckets[:] = [_own_bucket(ours, theirs) for ours, theirs in zip(staged, list(buckets), strict=True)]
        else:
            buckets[:] = staged
        self._thread = threading.Thread(
            target=self._write, args=(request.async_fn, arguments), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def _write(self, function: Callable, arguments: list) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the trainer's thread raises it, on every rank
            arguments[2].put(error)
            return
        try:
            self._digests |= shard_digests(self._draft.path, torch.distributed.get_rank())
        except OSError as error:
            self._unreadable = f"what it wrote cannot be read: {error}"

    def _write_error(self) -> str | None:
        """What this rank's ended thread says went wrong; its result stays for Megatron to read."""
        if self._results is None or self._unreadable:
            return self._unreadable
        try:
            result = self._results.get(timeout=_RESULT_S)
        except queue.Empty:
            return "its writer ended without a result"
        self._results.put(result)
        return f"{type(result).__name__}: {result}" if isinstance(result, Exception) else None

    def _failure(self, error: BaseException) -> SaveError:
        return SaveError(
            f"{self._who}: the checkpoint {self.path} could not be written: {type(error).__name__}: {error}"
        )


class Saver:
    """One trainer's checkpoints: written at once, or one at a time in the background."""

    def __init__(self, *, in_background: bool, seconds: float):
        """seconds: how long a write in the background is waited for at most."""
        self._in_background, self._seconds = in_background, seconds
        self._pending: PendingSave | None = None

    def save(self, draft: Draft, state: TrainState) -> str:
        """Write a checkpoint, or begin to; its path. Waits for the one before it. Raises SaveError."""
        self.finish(wait=True)
        self._pending = PendingSave(draft, state, seconds=self._seconds, copies=self._in_background)
        path = self._pending.path
        if not self._in_background:
            self.finish(wait=True)
        return path

    def finish(self, *, wait: bool) -> bool:
        """Whether no save is under way any more; wait: until there is none.

        Raises SaveError if one could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None  # after a failure there is none either
            if not pending.finish(wait=wait):
                self._pending = pending
        return self._pending is None


def _own_bucket(staged: tuple, original: tuple) -> tuple:
    """Megatron's bucket (path, name, (bytes, tensors)) with tensors that training does not change.

    Staging copies from a GPU, and leaves host memory shared.
    """
    path, name, (blobs, tensors) = staged
    own = []
    for (item, tensor), (_, live) in zip(tensors, original[2][1], strict=True):
        own.append((item, tensor.clone() if tensor.data_ptr() == live.data_ptr() else tensor))
    return path, name, (blobs, own)
