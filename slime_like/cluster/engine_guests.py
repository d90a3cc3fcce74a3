"""External engines that join a run while it is up, and leave it: a file in the run directory says which.

    echo http://10.1.0.5:30000 >> runs/mine/engines.txt        # it joins
    sed -i '/10.1.0.5/d' runs/mine/engines.txt                 # it leaves, once its requests have ended

One address a line; # begins a comment. Whoever may write the file decides where requests and weights go: only its
owner may.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import time
from pathlib import Path

from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.external_engines import joining_plan
from slime_like.cluster.members import Member, MemberState
from slime_like.config.run import RunConfig
from slime_like.config.transports import transport_of
from slime_like.errors import EngineError, RunError, WaitTimeout
from slime_like.utils.net import engine_url

logger = logging.getLogger(__name__)

FILE = "engines.txt"
#: Whoever changed the file so short a time ago, in seconds, may be writing still.
_WRITING_S = 1.0


@dataclasses.dataclass(frozen=True)
class GuestChanges:
    """joined: members that are up, and wait for weights. serving_changed: whether one takes no more requests, or takes
    them already. notes: for the console.
    """

    joined: tuple[int, ...] = ()
    serving_changed: bool = False
    notes: tuple[str, ...] = ()


class EngineGuests:
    """Asked again and again; the file is read when it has changed. A run that goes on reads it, too."""

    def __init__(self, fleet: EngineFleet, config: RunConfig, run_dir: str, transport: str | None):
        self._fleet, self._config, self._path = fleet, config, Path(run_dir) / FILE
        self._by_card = transport is not None and transport_of(transport).by_card
        self._seen: tuple[int, int] | None = None  # time of change and size of the file
        self._asked_for: set[str] = set()  # addresses in the file
        self._guests: set[str] = set()  # addresses of members that have come by the file
        self._refused: set[str] = set()  # addresses in the file whose engines could not join
        self._leaving: dict[int, float] = {}  # member -> until when its requests may run

    def look(self) -> GuestChanges:
        """Begin what the file says, and end what has been begun. Takes a second for each engine that joins."""
        notes: list[str] = []
        self._read(notes)
        before = self._fleet.endpoints
        new = sorted(self._asked_for - self._guests - self._refused)
        joined = [index for url in new for index in self._join(url, notes)]
        for member in self._members():
            if self._must_leave(member):
                self._begin_leave(member, notes)
        for index in list(self._leaving):
            self._end_leave(index, notes)
        for note in notes:
            logger.info("%s", note)
        return GuestChanges(tuple(joined), self._fleet.endpoints != before, tuple(notes))

    def is_guest(self, index: int) -> bool:
        """Whether a member has come by the file."""
        return any(member.index == index for member in self._members())

    def _members(self) -> list[Member]:
        """Those that have come by the file."""
        return [
            member
            for member in self._fleet.members
            if member.endpoint is not None and member.endpoint.url in self._guests
        ]

    def _must_leave(self, member: Member) -> bool:
        serves = member.state is MemberState.SERVING
        return serves and member.endpoint is not None and member.endpoint.url not in self._asked_for

    def _read(self, notes: list[str]) -> None:
        try:
            facts = os.stat(self._path)
        except FileNotFoundError:
            self._asked_for, self._seen = set(), None
            return
        age_s = time.time() - facts.st_mtime
        if self._seen == (facts.st_mtime_ns, facts.st_size) or 0 <= age_s < _WRITING_S:
            return
        self._seen = (facts.st_mtime_ns, facts.st_size)
        if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            notes.append(f"{self._path} is not read: others may write it. Fix: chmod 600, as the user of this run.")
            return
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")  # what is no text is no address
        except OSError as error:  # gone, or replaced, since it was looked at
            self._seen = None
            notes.append(f"{self._path} is not read: {error}")
            return
        urls: set[str] = set()
        for line in text.splitlines():
            address = line.partition("#")[0].strip()
            try:
                urls |= {engine_url(address)} if address else set()
            except ValueError as error:
                notes.append(f"{self._path}: {error}")
        self._refused &= urls
        self._asked_for = urls

    def _join(self, url: str, notes: list[str]) -> list[int]:
        """The member's number, if it can join; else a note why not, and nothing until its line is written anew."""
        try:
            if self._by_card:
                raise EngineError("weights go to engines on the trainer's own cards only (--colocate)")
            member = self._fleet.add(joining_plan(self._config, url, self._fleet.membership.next_index))
        except RunError as error:
            self._refused.add(url)
            notes.append(f"the engine at {url} cannot join: {error}")
            return []
        self._guests.add(url)
        if member.state is MemberState.SERVING:
            notes.append(f"{member.name} has joined, and serves its first weights as all do")
            return []
        notes.append(f"{member.name} joins, and waits for its weights")
        return [member.index]

    def _begin_leave(self, member: Member, notes: list[str]) -> None:
        least = self._config.engine.min_engines
        if self._fleet.num_members <= least:
            if member.index not in self._leaving:
                self._leaving[member.index] = float("inf")
                notes.append(f"{member.name} cannot leave: --min-engines {least} are to serve")
            return
        self._leaving[member.index] = time.monotonic() + self._config.rollout.rollout_request_timeout_s
        notes.append(f"{member.name} leaves: it takes no more requests")
        try:
            self._fleet.drain(member.index, timeout_s=0.0)
        except WaitTimeout:
            return  # it is drained over the next looks
        except RunError as error:
            notes.append(f"{member.name}: {error}")

    def _end_leave(self, index: int, notes: list[str]) -> None:
        member = next((one for one in self._fleet.members if one.index == index), None)
        if member is None or member.state is MemberState.DEAD:
            del self._leaving[index]
        elif member.state is MemberState.DRAINING:
            late = time.monotonic() > self._leaving[index]
            if self._is_busy(index) and not late:
                return
            self._fleet.remove(index)
            del self._leaving[index]
            if member.endpoint is not None:
                self._guests.discard(member.endpoint.url)
            notes.append(f"{member.name} has left" + (", late: its requests were not waited for" if late else ""))

    def _is_busy(self, index: int) -> bool:
        try:
            return self._fleet.num_requests(index) > 0
        except RunError as error:
            logger.warning("engine %d leaves without a word: %s", index, error)
            return False

    def forget(self, index: int) -> None:
        """A member could not be brought up: nothing of it is asked until its line is written anew."""
        url = next(member.endpoint.url for member in self._members() if member.index == index and member.endpoint)
        self._guests.discard(url)
        self._refused.add(url)
