"""What is counted of episodes, from one rollout to the next; all names are here."""

from __future__ import annotations

import collections

#: Always there, so that a plot has no gaps: 0 where nothing of the kind happened.
_ALWAYS = ("malformed_calls", "resubmitted_turns", "forks", "violations", "trimmed_tokens", "env_close_failures")
_ENDINGS = ("done", "env_truncated", "max_turns", "length", "context")
_FAILURES = ("error", "timeout", "template", "violation", "context")


class EpisodeTally:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._most_turns = 0

    def count(self, name: str, number: float = 1) -> None:
        """Add to a count."""
        self._counts[name] += number  # type: ignore[assignment]  # seconds are no whole number

    def failed(self, kind: str) -> None:
        """An episode that gave nothing; the caller may play it again."""
        self.count(f"failed/{kind}")

    def ended(self, ending: str, *, turns: int, rows: int, drifted: bool) -> None:
        """An episode with samples."""
        self._most_turns = max(self._most_turns, turns)
        for name, number in {"num": 1, "turns": turns, "rows": rows, "drifted": int(drifted)}.items():
            self.count(name, number)
        self.count(f"ended/{ending}")

    def take(self, prefix: str) -> dict[str, float]:
        """Name, behind the prefix -> value, and begin anew; {} if nothing was played.

        Means are over episodes that gave samples.
        """
        counts, most_turns = self._counts, self._most_turns
        self._counts, self._most_turns = collections.Counter(), 0
        if not counts:
            return {}
        num = counts.pop("num", 0)
        sums = {name: counts.pop(name, 0) for name in ("turns", "rows", "drifted", "seconds")}
        always = (*_ALWAYS, *(f"ended/{name}" for name in _ENDINGS), *(f"failed/{name}" for name in _FAILURES))
        metrics = dict.fromkeys(always, 0.0) | {name: float(value) for name, value in counts.items()}
        metrics |= {"num": float(num), "turns_max": float(most_turns)}
        if num:
            metrics |= {f"{name}_mean": sums[name] / num for name in ("turns", "rows", "seconds")}
            metrics["drifted_ratio"] = sums["drifted"] / num
        return {prefix + name: value for name, value in metrics.items()}
