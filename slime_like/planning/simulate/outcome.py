"""What a simulated run gave: seconds a step, who waited, and what became of the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the train steps that count.

    Shares are of the wall time: engines_busy + engines_sync + engines_idle = 1, averaged over engines, and so for the
    trainer. running_mean: requests that run on an engine while it is busy. Staleness in train steps.
    """

    mode: str
    step_s: float
    steps: int
    engines_busy: float
    engines_sync: float
    trainer_busy: float
    trainer_sync: float
    running_mean: float
    trained_samples: int
    trained_tokens: float  # prompts among them, as the trainer sees them
    decoded_tokens: float
    lost_tokens: float  # of groups that were dropped or made anew
    again_tokens: float  # prefilled once more because weights changed or answers were taken out
    staleness_mean: float
    staleness_max: int
    ready_mean: float | None  # groups that waited when a batch was taken, itself included; None: not computed
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)  # reason -> groups
    requeued: int = 0
    scaled_by: int = 1  # engines and batch were simulated that many times smaller
    mean_length: float = 0.0  # response tokens of a trained sample

    @property
    def engines_idle(self) -> float:
        """The rest of the engines' time."""
        return max(0.0, 1 - self.engines_busy - self.engines_sync)

    @property
    def trainer_idle(self) -> float:
        """The rest of the trainer's time."""
        return max(0.0, 1 - self.trainer_busy - self.trainer_sync)

    @property
    def samples_per_s(self) -> float:
        """Trained on."""
        return self.trained_samples / (self.step_s * self.steps)

    @property
    def bottleneck(self) -> str:
        """Who waits least: "engines" or "trainer"."""
        return "engines" if self.engines_idle < self.trainer_idle else "trainer"

    def to_dict(self) -> dict:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "dropped": dict(self.dropped),
            "engines_idle": self.engines_idle,
            "trainer_idle": self.trainer_idle,
            "samples_per_s": self.samples_per_s,
        }
