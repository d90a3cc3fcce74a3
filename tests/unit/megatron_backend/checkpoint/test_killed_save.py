"""A save that is killed before any of its file operations: what was whole stays whole, one newest can be loaded, and
the next save leaves as many checkpoints as are asked for, and nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.megatron_backend.checkpoint.folder import STATE_FILE, TRACKER, Draft, damage, find, iterations

#: What changes a folder, as Python's audit events name it.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save(folder: Path, number: int, **keeps) -> None:
    draft = Draft(folder=str(folder), number=number, record={"num_rollouts_done": number}, **keeps)
    draft.make()
    for name in ("__0_0.distcp", "common.pt"):
        (Path(draft.path) / name).write_bytes(f"{number} {name}".encode())
    draft.publish()


def killed_before(number: int, folder: Path, work: Callable[[], None]) -> bool:
    """Run `work` in a process that kills itself before its n-th operation in the folder; whether it came to that."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event not in OPERATIONS or not str(arguments[0]).startswith(str(folder)):
                return
            if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "saved", "keeps", "left"),
    [
        ((2, 4), 5, {"total_limit": 2}, (5, 6)),
        ((2, 4, 5), 6, {"retain_interval": 2}, (2, 4, 6, 7)),
        ((2, 4, 5), 6, {"retain_interval": 4, "total_limit": 2}, (4, 7)),
        ((2, 4, 5), 5, {"total_limit": 2}, (5, 6)),  # done again after a resume from 4
    ],
    ids=["limit", "interval", "both", "again"],
)
def test_a_save_that_is_killed_anywhere_tears_nothing(tmp_path, before, saved, keeps, left):
    number, killed = 0, True
    while killed:
        folder = tmp_path / f"before-{number}"
        for one in before:
            save(folder, one)
        killed = killed_before(number, folder, lambda folder=folder: save(folder, saved, **keeps))
        whole = sorted(iterations(str(folder)))
        assert whole and whole[-1] in (before[-1], saved, 4), (number, whole)
        for one in whole:
            assert damage(find(str(folder), one)) == [], (number, one)
        if saved not in whole:
            save(folder, saved, **keeps)  # the run that goes on comes here again
        save(folder, saved + 1, **keeps)
        assert sorted(iterations(str(folder))) == list(left), number
        names = {f"iter_{one:07d}" for one in left} | {TRACKER}
        assert {path.name for path in folder.iterdir()} == names, number
        assert all((folder / f"iter_{one:07d}" / STATE_FILE).exists() for one in left)
        number += 1
    print(f"{number - 1} places")
    assert number > 12
