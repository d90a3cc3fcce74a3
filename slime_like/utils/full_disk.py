"""A full disk, where a run can go on: what belongs to its records is lost and counted instead of ending it."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

logger = logging.getLogger(__name__)

#: No room on the disk, in the user's quota, or under a limit on files' sizes.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LostWrites:
    """What could not be written down. One in a process, as loggers are: LOST_WRITES."""

    def __init__(self) -> None:
        self._total = 0
        self._missing: dict[str, int] = {}  # writes to each file since the last that went well
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Writes that were lost so far."""
        return self._total

    def count(self) -> None:
        """One more, unsaid."""
        with self._lock:
            self._total += 1

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Inside, a write to `what` that has no room is counted instead of raised; said when that begins, and ends."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            with self._lock:
                self._total += 1
                self._missing[what] = self._missing.get(what, 0) + 1
                begins = self._missing[what] == 1
            if begins:
                logger.warning("%s: %s. The run goes on, and what belongs there is lost.", what, error.strerror)
        else:
            with self._lock:
                missing = self._missing.pop(what, 0)
            if missing:
                logger.warning("%s is written again; %d writes are missing in it.", what, missing)


LOST_WRITES = LostWrites()


class _Lossy(io.FileIO):
    """A file that takes everything: what has no room is counted, and gone."""

    def write(self, data) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            LOST_WRITES.count()  # unsaid: where it would be said is what is full
            return len(data)


def lose_output_when_full() -> None:
    """Standard output and error of this process no longer raise when the file that they go to has no room.

    For processes whose libraries print: a full disk would else end a train step. Streams that somebody has put in
    their places are left alone.
    """
    sys.stdout, sys.stderr = _lossy(sys.stdout, sys.__stdout__), _lossy(sys.stderr, sys.__stderr__)


def _lossy(stream: TextIO, original: TextIO | None) -> TextIO:
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    with LOST_WRITES.going_on(stream.name):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
