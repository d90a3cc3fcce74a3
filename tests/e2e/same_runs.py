"""What two runs of one command must have in common to the bit, and where they differ."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tests.e2e.runs import Finished

#: Parts of the names of metrics that tell of time.
TIMES = ("seconds", "per_second", "bound_share")
#: Kinds of metric lines that begin with a step, and those that come after it with the number of steps done.
KINDS = ("rollout", "train", "sync", "eval")
_AFTER = ("sync", "eval")


def numbers(run: Finished, first: int = 0, until: float = math.inf) -> dict[tuple[str, int], dict]:
    """(kind, step) -> every metric but times, of steps from `first` on, before `until`, and what comes after them."""
    lines = {}
    for kind in KINDS:
        for line in run.metrics(kind):
            if first <= line["step"] < until + (kind in _AFTER):
                key = (kind, line["step"])
                assert key not in lines, f"{key} stands twice in {run.run_dir / 'metrics.jsonl'}"
                lines[key] = {
                    name: value
                    for name, value in line.items()
                    if name != "time" and not any(part in name for part in TIMES)
                }
    return lines


def samples(run: Finished, first: int = 0, until: float = math.inf) -> dict[int, dict[str, bytes]]:
    """Rollout -> its arrays as --save-debug-rollout-data run_dir/rollouts/{rollout_id}.npz wrote them: tokens,
    log-probs, versions, and rewards and texts as JSON."""
    rollouts = {}
    for path in (run.run_dir / "rollouts").glob("*.npz"):
        if first <= int(path.stem) < until:
            with np.load(path, allow_pickle=False) as arrays:
                rollouts[int(path.stem)] = {name: arrays[name].tobytes() for name in arrays.files}
    return rollouts


def assert_same(
    first: Finished, second: Finished, since: int = 0, without: tuple[str, ...] = (), until: float = math.inf
) -> int:
    """Every metric but times and `without`, and every token, from step `since` on, before `until`; gives how many
    numbers.
    """
    ours, theirs = numbers(first, since, until), numbers(second, since, until)
    assert list(ours) and set(ours) == set(theirs), set(ours) ^ set(theirs)
    names = {key: {name for name in {**ours[key], **theirs[key]} if name not in without} for key in ours}
    differing = [
        f"{key} {name}: {ours[key].get(name)!r}, {theirs[key].get(name)!r}"
        for key, those in names.items()
        for name in sorted(those)
        if ours[key].get(name) != theirs[key].get(name)
    ]
    assert not differing, "\n".join(differing[:30])
    one, other = samples(first, since, until), samples(second, since, until)
    assert one and set(one) == set(other)
    for rollout, arrays in one.items():
        parts = [name for name in arrays if arrays[name] != other[rollout].get(name)]
        assert not parts, f"rollout {rollout}: {', '.join(parts)} differ"
    return sum(map(len, names.values()))


def flags(run_dir: Path) -> list[str]:
    """What every compared run writes."""
    return ["--save-debug-rollout-data", str(run_dir / "rollouts" / "{rollout_id}.npz")]
