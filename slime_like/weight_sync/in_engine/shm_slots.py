"""A bucket's bytes in a file in shared memory, and how an engine finds the tensors in it.

Imports nothing heavy at the start: the engine uses it too.
The tensors come first, one behind the other; behind them their table as JSON, whose place the request tells.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterator

#: The folder that the launcher announced; equal to sglang_backend.shared_memory.DIRECTORY_VARIABLE (not imported: this
#: stays light).
DIRECTORY_VARIABLE = "SLIME_LIKE_SHM_DIR"

#: Engine side: path -> (inode, size, mapping). Mapping pages anew for each bucket would cost as much as copying them.
_mapped: dict[str, tuple[int, int, mmap.mmap]] = {}


def tensors(path: str, start: int, stop: int) -> Iterator[tuple]:
    """(name, tensor) of all in the file: views of shared memory, to be copied before the request is answered.

    Raises ValueError for a table that lies.
    """
    import torch

    mapping = _mapping(path)
    if not 0 <= start <= stop <= len(mapping):
        raise ValueError(f"{path}: a table at {start} to {stop} of {len(mapping)} bytes")
    # A copy-on-write mapping would do as well, if torch took memory that must not be written to without a warning.
    yield from views(torch.frombuffer(mapping, dtype=torch.uint8), json.loads(mapping[start:stop]), start)


def views(memory, table: list, end: int) -> Iterator[tuple]:
    """(name, tensor) of a table's rows [name, dtype, shape, start, stop]. memory: uint8; the tensors end before `end`.

    Raises ValueError.
    """
    import torch

    for name, dtype, shape, first, last in table:
        if not 0 <= first <= last <= end:
            raise ValueError(f"{name} at {first} to {last}, before a table at {end}")
        yield name, memory[first:last].view(getattr(torch, dtype)).view(shape)


def checked_path(path: str, directory: str | None, is_kind: Callable[[int], bool] = stat.S_ISREG) -> str:
    """The path, if it is a plain file (or what is_kind says) of ours below `directory`.

    Raises PermissionError otherwise: whoever has the API key sends it.
    """
    if not directory:
        raise PermissionError(
            f"{DIRECTORY_VARIABLE} is not set: this server was not started to load weights from shared memory"
        )
    real = os.path.realpath(path)
    if os.path.commonpath([real, os.path.realpath(directory)]) != os.path.realpath(directory):
        raise PermissionError(f"{path} is outside of {directory}")
    info = os.lstat(real)
    if not is_kind(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(f"{path} is no plain file of ours")
    return real


def _mapping(path: str) -> mmap.mmap:
    """The whole file in memory, mapped once for as long as it has this size."""
    for known in [known for known in list(_mapped) if not os.path.exists(known)]:
        _mapped.pop(known, None)  # its memory is free once no engine maps it any more
    with open(path, "r+b") as file:
        info = os.fstat(file.fileno())
        inode, size, mapping = _mapped.get(path, (0, 0, None))
        if mapping is None or (inode, size) != (info.st_ino, info.st_size):
            mapping = mmap.mmap(file.fileno(), info.st_size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            _mapped[path] = (info.st_ino, info.st_size, mapping)
    return mapping


class SharedFile:
    """Trainer side: a file that only we can read, of a size that can change.

    The memory is really there, so that writing cannot fail.
    """

    def __init__(self, path: str):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def resize(self, size: int) -> mmap.mmap:
        """The file with `size` bytes, mapped; contents up to there stay. Raises OSError where shared memory is full."""
        os.ftruncate(self._descriptor, size)
        # Without pages behind it, writing into the mapping would end the process (SIGBUS) instead of raising.
        os.posix_fallocate(self._descriptor, 0, size)
        return mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))

    def close(self) -> None:
        """Remove the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
