"""The progress line that a person reads while a run goes on."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

_BARS = "▁▂▃▄▅▆▇█"
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def sparkline(values: Sequence[float], *, width: int = 12, low: float | None = None, high: float | None = None) -> str:
    """The values as small bars, the newest at the right; longer series are averaged in equal parts.

    low, high: the scale's ends; by default the values' own. Values that are not finite are left out.
    Example: [0, 1, 2, 3] -> "▁▃▆█"
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    bottom = min(means) if low is None else low
    span = (max(means) if high is None else high) - bottom
    if span <= 0:
        return _BARS[0] * count
    return "".join(_BARS[round(min(1.0, max(0.0, (value - bottom) / span)) * (len(_BARS) - 1))] for value in means)


class ProgressConsole:
    """Prints one line a rollout. Colours only on a terminal.

    Example: rollout 12/40  reward 0.56 ▁▂▃▅  tokens 1280  loss 0.0123  gen 1.2s  train 1.9s  sync 0.1s
    """

    def __init__(self, num_rollouts: int, stream: TextIO | None = None):
        self.num_rollouts = num_rollouts
        self.stream = stream or sys.stdout
        self._rewards: list[float] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of rollout `step` (counted from 0). Metrics that are missing are left out."""
        reward = metrics.get("rollout/reward_mean")
        if reward is not None:
            self._rewards.append(float(reward))
        self._print(progress_text(step, self.num_rollouts, metrics, self._rewards), _BOLD)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print mean rewards and pass rates of an evaluation done after `step` rollouts.

        The mean reward only where it says more than pass@1.
        """
        shown = {name: value for name, value in metrics.items() if name.rpartition("/")[2].startswith("pass@")}
        shown |= {
            name: value
            for name, value in metrics.items()
            if name.endswith("/reward_mean") and value != shown.get(f"{name.rpartition('/')[0]}/pass@1")
        }
        rates = [f"{name.removeprefix('eval/')} {shown[name]:.3f}" for name in metrics if name in shown]
        self._print(f"eval after {step} rollouts  " + "  ".join(rates), _DIM)

    def note(self, text: str) -> None:
        """Print a line as it is."""
        self._print(text, "")

    def _print(self, text: str, style: str) -> None:
        if style and self.stream.isatty():
            head, gap, rest = text.partition("  ")
            text = f"{style}{head}{_RESET}{gap}{rest}"
        try:
            self.stream.write(text + "\n")
        except UnicodeEncodeError:  # a terminal or pipe in ASCII
            self.stream.write(text.encode("ascii", "replace").decode() + "\n")
        self.stream.flush()


def progress_text(step: int, num_rollouts: int, metrics: Mapping[str, float], rewards: Sequence[float]) -> str:
    """The progress line as plain text."""
    parts = [f"rollout {step + 1}/{num_rollouts}"]
    if "rollout/reward_mean" in metrics:
        low, high = (0.0, 1.0) if all(0 <= reward <= 1 for reward in rewards) else (None, None)
        parts.append(f"reward {metrics['rollout/reward_mean']:.2f} {sparkline(rewards, low=low, high=high)}".rstrip())
    if "rollout/tokens" in metrics:
        parts.append(f"tokens {metrics['rollout/tokens']:.0f}")
    for name, label in (("train/loss", "loss"), ("train/logprob_abs_diff", "logp diff")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.3g}")
    for phase, label in (("generate", "gen"), ("train", "train"), ("sync", "sync")):
        if f"step/{phase}_seconds" in metrics:
            parts.append(f"{label} {metrics[f'step/{phase}_seconds']:.1f}s")
    if metrics.get("rollout/failed_samples"):
        parts.append(f"failed {metrics['rollout/failed_samples']:.0f}")
    return "  ".join(parts)
