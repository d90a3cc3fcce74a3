"""Say how far a run's reward rose, draw its curve, and fail if it rose too little.

usage: show_rise.py RUN_DIR [--least-rise 0.4] [--least-rollouts 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap

from slime_like.errors import UserError
from slime_like.observability.curve import draw_reward_curve, reward_series
from slime_like.utils.files import RunDirectory

#: Rollouts averaged at each end of the curve.
FIRST, LAST = 3, 5
WHAT_IT_SHOWS = "selection: the warm-up planted right and wrong behaviours, RL found the rewarded one and sharpened it"


def rise(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first 3 and of the last 5 rollouts; of fewer when there are fewer.

    Example: [0, 0, 0, 1, 1, 1, 1, 1] -> (0.0, 1.0)
    """
    return statistics.fmean(rewards[:FIRST]), statistics.fmean(rewards[-LAST:])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns 0, 1 if the reward rose too little, or 2 if there is no reward to judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", help="Directory of a run, with metrics.jsonl.")
    parser.add_argument("--least-rise", type=float, default=0.0, help="Fail below this rise of the mean reward.")
    parser.add_argument("--least-rollouts", type=int, default=0, help="Do not judge a run of fewer rollouts.")
    args = parser.parse_args(argv)
    run = RunDirectory(args.run_dir)
    try:
        series = reward_series(run)
        rewards = series.get("rollout/reward_mean", ([], []))[1]
        if not rewards:
            raise UserError(f"{run.metrics}: no rollout has a reward")
        curve = draw_reward_curve(run, caption=textwrap.fill(WHAT_IT_SHOWS, 70))
    except UserError as error:
        print(f"show_rise: {error}", file=sys.stderr)
        return 2
    first, last = rise(rewards)
    counts = f"mean of the first {min(FIRST, len(rewards))} and the last {min(LAST, len(rewards))} rollouts"
    print(f"\nreward  {first:.2f} -> {last:.2f}  (rise {last - first:+.2f}; {counts})")
    for name, (steps, values) in sorted(series.items()):
        if name.endswith("/pass@1"):
            print(
                f"{name}  " + "  ".join(f"{value:.2f} after {step}" for step, value in zip(steps, values, strict=True))
            )
    print(f"What the curve shows is {WHAT_IT_SHOWS}.\nrun    {run.path}\ncurve  {curve}")
    if len(rewards) < args.least_rollouts:
        print(f"Not judged: {len(rewards)} rollouts are fewer than {args.least_rollouts}.")
    elif last - first < args.least_rise:
        print(f"show_rise: the reward rose by {last - first:.2f}, less than {args.least_rise}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
