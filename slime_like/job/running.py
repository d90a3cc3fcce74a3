"""A run that can start, and a run that is up: what phases and loops drive.

No Ray: a test puts one together from parts of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from slime_like.config.run import RunConfig
from slime_like.job.protocols import Closes, Engines, Rollouts, Tend, Trainer, Watch
from slime_like.observability.progress import Progress
from slime_like.planning.placement import PlacementPlan
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.utils.files import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """All that a run needs to know before it starts. No field is None."""

    config: RunConfig  # rollout count, transport and paths filled in: what every process gets
    plan: PlacementPlan  # with the sizes of external engines
    run: RunDirectory
    data: DataSource  # read once; without rows where recorded rollouts replace it
    num_rollout: int
    ends_only: bool = False  # whether only what comes after the last rollout is left to do
    notes: tuple[str, ...] = ()  # for the user
    progress: Progress = dataclasses.field(default_factory=Progress)  # what the run is doing


def _nobody(phase: str) -> Watch:
    return lambda: None


@dataclasses.dataclass
class Job:
    """The parts of a run; a part that its mode has not is None."""

    resolved: ResolvedRun
    trainer: Trainer | None = None
    critic: Trainer | None = None  # with an estimator that needs one
    reference: Trainer | None = None  # on GPUs of its own; else it lives in the trainer's processes
    engines: Engines | None = None
    rollouts: Rollouts | None = None
    num_rollouts_done: int = 0  # by the checkpoint that was loaded
    client_state: dict = dataclasses.field(default_factory=dict)  # of that checkpoint
    start_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    feed: PromptFeed = dataclasses.field(init=False)  # of supervised rows; a run with rollouts has its own inside them
    bf16: bool = False  # whether the trainer's weights are
    watch: Callable[[str], Watch] = _nobody  # for a phase: raises RunError if a process of the run has died
    tend: Tend | None = None  # asked each second while engines generate; None: an engine that dies ends the run
    #: everything that was started, in the order in which it must end
    closing: list[Closes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.feed = PromptFeed(self.resolved.data)

    @property
    def config(self) -> RunConfig:
        """Every option, resolved."""
        return self.resolved.config

    @property
    def run(self) -> RunDirectory:
        """Where everything of this run lies."""
        return self.resolved.run

    @property
    def num_rollout(self) -> int:
        """Rollout steps of the whole run."""
        return self.resolved.num_rollout

    def close(self) -> None:
        """End everything, in the order that lets each part end cleanly."""
        parts, self.closing = self.closing, []
        _close_in_order(parts)


def _close_in_order(parts: Sequence[Closes | None]) -> None:
    """Close all that are there, each even if one before it fails; the first failure is raised at the end."""
    first: BaseException | None = None
    for part in parts:
        if part is None:
            continue
        try:
            part.close()
        except Exception as error:  # noqa: BLE001 - raised below, when everything else has ended
            first = first or error
    if first is not None:
        raise first
