"""Turns of several trainer sources that broadcast to the same engines, one bucket each.

A broadcast needs all engines at once, and an engine works on one request at a time. If one engine began with a bucket of the first source
and another with one of the second, each would wait inside its broadcast for the other: for good. So only one source at a time has requests
out. Who has a bucket ready draws a ticket, and tickets are served in order: nobody waits for a source that is still gathering.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

from torch.distributed import DistStoreError, TCPStore

from slime_like.errors import WaitTimeout, WeightSyncError


class Turns:
    """One source's view of the tickets, which lie in a store that the first source hosts. One thread at a time uses it."""

    def __init__(self, host: str, port: int, *, is_host: bool, who: str, timeout_s: float):
        self._store = TCPStore(host, port, is_master=is_host, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s))
        self.port = self._store.port
        self._who, self._timeout_s = who, timeout_s
        self._round = 0

    def new_round(self) -> None:
        """Forget failures: a new sync begins. Every source calls it equally often."""
        self._round += 1

    @contextlib.contextmanager
    def turn(self, phase: str) -> Iterator[None]:
        """Wait for our turn and hold it. Raises WeightSyncError if a source before us failed in this round, WaitTimeout at the deadline."""
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
            raise WaitTimeout(who=self._who, whom=whom, phase=phase, seconds=self._timeout_s, last="the turn before was not given on") from error
        failure = self._store.get(key).decode()
        self._store.delete_key(key)
        return failure
