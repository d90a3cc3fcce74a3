"""The folder in shared memory through which weights go from trainer to engines on one host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
import time

from slime_like.errors import WeightSyncError

#: Tells an engine's weight loader the only folder from which it may read.
DIRECTORY_VARIABLE = "SLIME_LIKE_SHM_DIR"
#: SGLang's name of our weight loader; the launcher passes it to --custom-weight-loader.
WEIGHT_LOADER = "slime_like.weight_sync.in_engine.shm_loader.load"
_ROOT = "/dev/shm"
#: How old an empty folder of another run is before it is taken for one that was left: it may just have been made.
_LEFT_S = 60.0
#: How often the folder may be dropped by others while we make one in it; each of them drops it once.
_TRIES = 1000


def name_shared_directory() -> None:
    """Give this run a folder of its own, by a name that nobody can take before it: an environment variable, for the
    processes that it starts.
    """
    os.environ[DIRECTORY_VARIABLE] = f"{_ROOT}/{_prefix()}-{secrets.token_hex(8)}"


def shared_environment() -> dict[str, str]:
    """What tells a process of this run, on any host, the folder's name."""
    return {DIRECTORY_VARIABLE: shared_directory()}


def shared_directory() -> str:
    """Path of this run's folder, the same for all its processes; it need not exist.

    Of the user's, where no run was begun.
    """
    mine, named = f"{_ROOT}/{_prefix()}", os.environ.get(DIRECTORY_VARIABLE, "")
    return named if named.startswith(f"{mine}-") and os.path.dirname(named) == _ROOT else mine


def shared_directories() -> list[str]:
    """Folders of all runs of this user on this host, without those that are removed meanwhile."""
    with os.scandir(_ROOT) as entries:
        return sorted(entry.path for entry in entries if _is_ours(entry))


def _is_ours(entry: os.DirEntry) -> bool:
    if entry.name != _prefix() and not entry.name.startswith(f"{_prefix()}-"):
        return False
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another process of the run dropped it
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _prefix() -> str:
    return f"slime-like-{os.getuid()}"


def make_shared_directory() -> str:
    """Make the folder, readable by nobody else.

    Raises WeightSyncError if somebody else's is in its place, FileNotFoundError if another source dropped it meanwhile.
    """
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


def make_source_folder(prefix: str) -> str:
    """Make a folder in it that nobody else uses. Raises WeightSyncError if somebody else's is in its place."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # a source that closed meanwhile found it empty and dropped it
            return tempfile.mkdtemp(prefix=prefix, dir=make_shared_directory())
    raise WeightSyncError(f"{shared_directory()} was removed {_TRIES} times while a folder was made in it.")


def drop_shared_directory() -> None:
    """Remove the folder if it is empty: another source of the run may be using it."""
    with contextlib.suppress(OSError):
        os.rmdir(shared_directory())


def remove_dead_sources() -> None:
    """Remove what processes that were killed left in the folders: shared memory is memory until the machine restarts.

    Their names begin with the process id.
    """
    for folder in shared_directories():
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):
                pid = name.partition("-")[0]
                if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def tidy_shared_memory() -> None:
    """What a run whose trainers were killed owes its host: their folders are removed, its own, and those of runs that
    were killed whole.
    """
    remove_dead_sources()
    drop_shared_directory()
    for folder in shared_directories():
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(folder).st_mtime > _LEFT_S:
                os.rmdir(folder)
