"""dropped.jsonl of a run directory: which prompts nobody trains on, and why, a line each, written when it happens.

    {"prompt": 17, "why": "stale"}
    {"put_aside": 12, "error": "…"}               a row that failed too often (--on-reward-error drop), with its error
    {"resumed": {"stale": 3}, "position": 120}    after a resume: how many an earlier run names, in its own directory

A run that goes on in its own directory (--resume auto) leaves those in that its checkpoint counts.

Of every other prompt that was drawn, samples/ and the ledger of a checkpoint tell. Nothing of it is kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from slime_like.utils.files import append_text, read_json_lines, write_atomic
from slime_like.utils.full_disk import LOST_WRITES


class DropLog:
    """For Ledger(on_drop=…). path: None writes nothing."""

    def __init__(self, path: Path | None):
        self._path = path

    def __call__(self, prompt: int, why: str) -> None:
        """One prompt, known by its position in the stream of prompts."""
        self._write({"prompt": prompt, "why": why})

    def put_aside(self, row: int, error: str) -> None:
        """One row of the data, which no prompt is made of any more."""
        self._write({"put_aside": row, "error": error})

    def resumed(self, dropped: Mapping[str, int], position: int, rows: Collection[int] = ()) -> None:
        """What a checkpoint counts of before it was saved. rows: those that were put aside."""
        count = sum(dropped.values())
        if self._path is not None and self._path.exists():
            lines = read_json_lines(self._path)
            prompts = [number for number, line in enumerate(lines) if "prompt" in line]
            if len(prompts) >= count:  # this run's own
                later = set(prompts[count:])
                kept = [
                    line
                    for number, line in enumerate(lines)
                    if number not in later and line.get("put_aside", None) in (None, *rows)
                ]
                with LOST_WRITES.going_on(str(self._path)):
                    write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in kept))
                return
        self._write({"resumed": dict(dropped), "position": position})

    def _write(self, record: dict) -> None:
        if self._path is not None:
            with LOST_WRITES.going_on(str(self._path)):
                append_text(self._path, json.dumps(record) + "\n")
