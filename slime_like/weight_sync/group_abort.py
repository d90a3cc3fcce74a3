"""Ends collectives that nobody will answer: an NCCL kernel waits on the device for good, in the way of all others."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

#: How long an abort may take. NCCL's own waits for locks that another thread may hold.
_ABORT_S = 10.0
#: Groups that were let go of, and when their own threads have ended.
_left: list[tuple[Any, float]] = []
_leaving = threading.Lock()


def abort_group(group: Any, who: str, *, timeout_s: float = _ABORT_S) -> bool:
    """End all that runs in a process group, and the group with it; whether that was done.

    With NCCL by ncclCommAbort. gloo cannot be interrupted (torch's abort does nothing there, 2.13): its threads end at
    the group's own deadline. Each process aborts its own part: the others' go on waiting until they do the same.
    group: a torch.distributed.ProcessGroup.
    """
    if group.name() != "nccl":
        return False
    failures: list[BaseException] = []

    def abort() -> None:
        try:
            group.abort()
        except RuntimeError as error:  # of NCCL: what was to be ended is in ruins already
            failures.append(error)

    thread = threading.Thread(target=abort, name="abort a process group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or failures:
        reason = failures[0] if failures else f"not done after {timeout_s:g} s"
        logger.warning("%s: a process group could not be aborted: %s", who, reason)
        return False
    logger.info("%s: a process group was aborted", who)
    return True


def leave_group(group: Any, who: str, *, timeout_s: float) -> None:
    """Abort a group that may be in the middle of something for good; let go of gloo's, which cannot be aborted, until
    `destroy_left_groups` finds that timeout_s, its own deadline, has passed: its threads may be in it until then.

    One of NCCL that could not be aborted is never ended: to destroy it would wait for its kernels.
    """
    if group is not None and not abort_group(group, who) and group.name() != "nccl":
        with _leaving:
            _left.append((group, time.monotonic() + timeout_s))


def destroy_left_groups() -> None:
    """End groups that were let go of and in which nobody can be any more: each holds 14 sockets and 4 threads."""
    import torch.distributed as dist

    with _leaving:
        now = time.monotonic()
        due = [group for group, ends in _left if ends <= now]
        _left[:] = [(group, ends) for group, ends in _left if ends > now]
    for group in due:
        with contextlib.suppress(ValueError):  # torch no longer knows it: it went when all groups did
            dist.destroy_process_group(group)
