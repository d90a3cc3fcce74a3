"""What several trainer sources that send to the same engines know of each other: their channels, that one failed, and
whose turn it is.

Engines that take streams (in_engine/intake.py) serve all sources at once: the first source asks them to, naming
everyone's channel. Other engines get one request a bucket, for which sources take turns: a broadcast needs all engines
at once, and an engine works on one request at a time. If one engine began with a bucket of the first source and another
with one of the second, each would wait inside its broadcast for the other: for good. So only one source at a time has
requests out. Who has a bucket ready draws a ticket, and tickets are served in order: nobody waits for a source that is
still gathering.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterable, Iterator

from torch.distributed import DistStoreError

from slime_like.errors import WaitTimeout, WeightSyncError
from slime_like.utils.net import listen_at
from slime_like.weight_sync.stores import join_store, serve_store

#: How often a wait looks whether it has become pointless.
_LOOK = datetime.timedelta(seconds=0.5)


class Sources:
    """One source's view of what all write into a store that the first one hosts. One thread at a time uses it."""

    def __init__(self, host: str, port: int, *, is_host: bool, who: str, timeout_s: float):
        self._store = (
            serve_store(listen_at(host, port), timeout_s=timeout_s)
            if is_host
            else join_store(host, port, timeout_s=timeout_s)
        )
        self.port = self._store.port
        self._who, self._timeout_s = who, timeout_s
        self._round = 0

    def new_round(self) -> None:
        """Forget failures: a new sync begins. Every source calls it equally often."""
        self._round += 1

    def announce(self, index: int, channel: str) -> None:
        """Tell the others the channel of source `index`, in this round."""
        self._store.set(f"{self._round}/channel/{index}", channel)

    def channels(self, sources: Iterable[int]) -> dict[int, str]:
        """Those of these sources.

        Raises WeightSyncError if one failed, WaitTimeout naming the source that is late.
        """
        deadline, awaited = time.monotonic() + self._timeout_s, sorted(sources)
        for index in awaited:
            while not self._has(f"{self._round}/channel/{index}"):
                self.check()
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        who=self._who,
                        whom=f"trainer source {index}",
                        phase="connect for weight sync",
                        seconds=self._timeout_s,
                        last="",
                    )
        return {index: self._store.get(f"{self._round}/channel/{index}").decode() for index in awaited}

    def fail(self, reason: str) -> None:
        """Tell the others that this round is lost."""
        self._store.compare_set(f"{self._round}/failed", "", f"{self._who}: {reason}")  # the first one's is the cause

    def check(self) -> None:
        """Raise WeightSyncError if a source has failed in this round."""
        key = f"{self._round}/failed"
        if self._store.check([key]):
            raise WeightSyncError(f"{self._who} stops: {self._store.get(key).decode()}")

    def _has(self, key: str) -> bool:
        try:
            self._store.wait([key], _LOOK)
        except DistStoreError:
            return False
        return True

    @contextlib.contextmanager
    def turn(self, phase: str) -> Iterator[None]:
        """Wait for our turn and hold it.

        Raises WeightSyncError if a source before us failed in this round, WaitTimeout at the deadline.
        """
        ticket = self._store.add(f"{self._round}/tickets", 1)
        failure = ""
        try:
            failure = self._failure_before(ticket, phase)
            if failure:
                raise WeightSyncError(f"{self._who} stops its {phase}: {failure}")
            yield
        except BaseException as error:
            failure = failure or f"{self._who}, {phase}: {type(error).__name__}: {error}"
            raise
        finally:
            self._store.set(f"{self._round}/done/{ticket}", failure)

    def _failure_before(self, ticket: int, phase: str) -> str:
        if ticket == 1:
            return ""
        key = f"{self._round}/done/{ticket - 1}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=self._timeout_s))
        except DistStoreError as error:
            whom = f"its turn, number {ticket} among the trainer sources'"
            raise WaitTimeout(
                who=self._who, whom=whom, phase=phase, seconds=self._timeout_s, last="the turn before was not given on"
            ) from error
        failure = self._store.get(key).decode()
        self._store.delete_key(key)
        return failure
