"""One exception for each thing that can go wrong; all of them survive pickling (they cross Ray).

UserError and its children are the user's to mend: train.py prints the message and exits with status 2.
RunError and its children are failures while running: exit status 1, naming role, rank and phase.
"""

from __future__ import annotations


class SlimeLikeError(Exception):
    """Root of every error that this package raises on purpose."""

    #: Whose it is, where one process of the run is known: "trainer rank 1".
    who: str = ""
    pid: int | None = None  # of that process


class UserError(SlimeLikeError):
    """What the user asked for is impossible; the message says what to change."""


class ConfigError(UserError):
    """The command line asks for something impossible. Lists every problem found, not only the first."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(f"[{i}] {p}" for i, p in enumerate(self.problems, 1)))

    def __reduce__(self):
        return (ConfigError, (self.problems,))


class PlacementError(UserError):
    """The roles do not fit on the GPUs asked for, or the cluster does not have them."""


class DataError(UserError):
    """A data file or a row in it cannot be used; names the file, the line and the key."""


class PluginError(UserError):
    """A `module.function` path cannot be loaded or has the wrong signature."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or of another architecture; names the file and the tensor."""


class RunError(SlimeLikeError):
    """A failure while running; names role, rank and phase."""


class ProcessLost(RunError):
    """A process of the run has ended without an error of its own: killed, out of memory, or its machine is gone."""


class SaveError(RunError):
    """A checkpoint could not be written; the one before it is still the latest. Names the folder and the rank."""


class EngineError(RunError):
    """An engine did not start, died, or answered with an error; carries the tail of its log."""


class WeightSyncError(RunError):
    """Weights did not arrive, or the engine reports another version than the one sent."""


class RewardError(RunError):
    """A reward function raised; names the sample."""


class WaitTimeout(RunError):
    """A deadline passed; names who waited, for whom, in which phase, and what was last heard."""

    def __init__(self, *, who: str, whom: str, phase: str, seconds: float, last: str):
        self.parts = {"who": who, "whom": whom, "phase": phase, "seconds": seconds, "last": last}
        super().__init__(f"{who} waited {seconds:.0f} s for {whom} during {phase}. Last heard: {last}")

    def __reduce__(self):
        return (_rebuild_wait_timeout, (self.parts,))


def _rebuild_wait_timeout(parts: dict) -> WaitTimeout:
    return WaitTimeout(**parts)
