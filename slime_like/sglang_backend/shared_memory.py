"""The folder in shared memory through which weights go from trainer to engines on one host."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

from slime_like.errors import WeightSyncError

#: Tells an engine's weight loader the only folder from which it may read.
DIRECTORY_VARIABLE = "SLIME_LIKE_SHM_DIR"
#: SGLang's name of our weight loader; the launcher passes it to --custom-weight-loader.
WEIGHT_LOADER = "slime_like.weight_sync.in_engine.shm_loader.load"
_ROOT = "/dev/shm"


def shared_directory() -> str:
    """Path of this user's folder, the same for every process of the user on the host; it need not exist."""
    return f"{_ROOT}/slime-like-{os.getuid()}"


def make_shared_directory() -> str:
    """Make the folder, readable by nobody else. Raises WeightSyncError if somebody else's is in its place."""
    path = shared_directory()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise WeightSyncError(
            f"{path} is not a folder of ours that only we can read (mode {info.st_mode:o}, owner {info.st_uid}). Fix:"
            " remove it."
        )
    return path


def drop_shared_directory() -> None:
    """Remove the folder if it is empty: another run of the user may be using it."""
    with contextlib.suppress(OSError):
        os.rmdir(shared_directory())


def remove_dead_sources() -> None:
    """Remove what processes that were killed left in the folder: shared memory is memory until the machine restarts.

    Their names begin with the process id.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(shared_directory()):
            pid = name.partition("-")[0]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                shutil.rmtree(os.path.join(shared_directory(), name), ignore_errors=True)


def tidy_shared_memory() -> None:
    """What a run whose trainers were killed owes its host: their folders are removed, and the one above if no other run
    uses it.
    """
    remove_dead_sources()
    drop_shared_directory()
