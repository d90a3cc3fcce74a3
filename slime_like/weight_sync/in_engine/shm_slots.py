"""A bucket's bytes in a file in shared memory, and how an engine finds the tensors in it.

Imports nothing heavy at the start: the engine uses it too.
The tensors come first, one behind the other; behind them their table as JSON, whose place the request tells. A row of
the table may name another file in which its tensor lies: the trainer's own parameters.
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
#: Linux's MADV_POPULATE_READ (5.14), which has no name in Python.
_POPULATE_READ = 22


@contextlib.contextmanager
def tensors(path: str, start: int, stop: int, directory: str | None) -> Iterator[Iterator[tuple]]:
    """Inside: (name, tensor) of all in the bucket, views of shared memory below `directory`, to be copied.

    Parameters of the trainer's are what they were, whatever a model's loader does to them (SGLang's for Gemma adds 1 to
    its norms in place). Raises ValueError for a table that lies, PermissionError as checked_path.
    """
    import torch

    path = checked_path(path, directory)
    mapping = _mapping(path)
    if not 0 <= start <= stop <= len(mapping):
        raise ValueError(f"{path}: a table at {start} to {stop} of {len(mapping)} bytes")
    bucket, others = torch.frombuffer(mapping, dtype=torch.uint8), dict[str, torch.Tensor]()

    def rows() -> Iterator[tuple]:
        for *row, other in (row if len(row) == 6 else [*row, ""] for row in json.loads(mapping[start:stop])):
            if not other:
                yield from views(bucket, [row], start)
                continue
            with torch.inference_mode(False):  # what is made in it does not count how often it is written to
                if other not in others:
                    own = _mapping(checked_path(other, directory), is_ours=True)
                    others[other] = torch.frombuffer(own, dtype=torch.uint8)
                (pair,) = views(others[other], [row], len(others[other]))
            yield pair

    try:
        yield rows()
    finally:
        for other in [other for other, memory in others.items() if memory._version]:
            # Pages that were written to are copies, which no sync would change.
            _mapping(checked_path(other, directory), is_ours=True).madvise(mmap.MADV_DONTNEED)


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


def _mapping(path: str, *, is_ours: bool = False) -> mmap.mmap:
    """The whole file in memory, mapped once for as long as it has this size.

    is_ours: what is written to a page is seen by this process alone, which sees nothing new of the page then.
    """
    for known in [known for known in list(_mapped) if not os.path.exists(known)]:
        _mapped.pop(known, None)  # its memory is free once no engine maps it any more
    with open(path, "r+b") as file:
        info = os.fstat(file.fileno())
        inode, size, mapping = _mapped.get(path, (0, 0, None))
        if mapping is None or (inode, size) != (info.st_ino, info.st_size):
            # Populating a private mapping would copy it.
            kind = mmap.MAP_PRIVATE if is_ours else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapping = mmap.mmap(file.fileno(), info.st_size, flags=kind)
            if is_ours:
                with contextlib.suppress(OSError):  # an older kernel: pages come one by one
                    mapping.madvise(_POPULATE_READ)
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
