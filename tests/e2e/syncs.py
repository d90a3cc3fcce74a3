"""What whole runs share that are about their weight syncs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.sglang_backend.shared_memory import shared_directories

#: Whole runs of what tests/multiprocess/test_fault_table.py does in a world of its own (scripts/test_long.sh).
LONG = pytest.mark.fault_table
#: Transport -> the flags that place trainer and engines for it.
PLACES = {"ipc": ("--colocate",), "broadcast": ()}


def buckets_left() -> list[str]:
    """Folders in shared memory of processes that are gone.

    Those of earlier runs are removed by each run that needs some.
    """
    return [
        path.name
        for folder in shared_directories()
        for path in Path(folder).glob("*-source-*")
        if not Path(f"/proc/{path.name.partition('-')[0]}").exists()
    ]
