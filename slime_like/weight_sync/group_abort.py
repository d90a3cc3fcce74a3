"""Ends collectives that nobody will answer: an NCCL kernel waits on the device for good, in the way of all others."""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

#: How long an abort may take. NCCL's own waits for locks that another thread may hold.
_ABORT_S = 10.0


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
