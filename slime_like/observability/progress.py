"""What a run is doing just now, for whoever has to say why it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator


def _nobody(text: str) -> None:
    """Where nobody keeps it."""


@dataclasses.dataclass
class Progress:
    """The present phase, step (from 0) and weight version, and what ended well last and when (unix seconds).

    keep: hears every change as JSON (`to_json`); utils/supervise.py's `keep_state` outlives the driver.
    Example: with progress.phase_of("train"): ...  # a failure inside leaves "train" as the phase
    """

    keep: Callable[[str], None] = _nobody
    phase: str = "start"
    step: int = 0
    version: int = 0  # of the weights that engines serve; 0: before the first sync
    last: str = "nothing yet"
    last_time: float = dataclasses.field(default_factory=time.time)

    @contextlib.contextmanager
    def phase_of(self, name: str) -> Iterator[None]:
        """Inside, the run is in this phase; its end is progress, but for one that fails, which stays the phase."""
        before, self.phase = self.phase, name
        self._changed()
        yield
        self.phase = before
        self.advanced(f"{name}, step {self.step}")

    def begin_step(self, step: int) -> None:
        """Whatever comes is of this step."""
        self.step, self.phase = step, "between phases"
        self._changed()

    def advanced(self, what: str) -> None:
        """Something ended well."""
        self.last, self.last_time = what, time.time()
        self._changed()

    def serves(self, version: int) -> None:
        """Engines have these weights."""
        self.version = version
        self._changed()

    def to_json(self) -> str:
        """A line of less than 500 bytes."""
        return json.dumps(
            {"phase": self.phase[:100], "step": self.step, "version": self.version, "last": self.last[:100]}
            | {"last_time": round(self.last_time, 3)}
        )

    @staticmethod
    def from_json(line: str) -> Progress:
        """As it was kept. Raises ValueError for anything else."""
        return Progress(**json.loads(line))

    def _changed(self) -> None:
        self.keep(self.to_json())
