"""How often Python looks for garbage that refers to itself."""

from __future__ import annotations

import gc

#: New containers between two looks; Python's own 700 are one answer's.
_EVERY_OBJECTS, _EVERY_YOUNG, _EVERY_MIDDLE = 10_000, 20, 20


def collect_seldom() -> None:
    """For a process that holds many requests at a time: each look goes over all that wait, and hardly finds any.

    A fifth of the rollout driver's CPU otherwise (benchmarks/rollout_driver.py). What refers to itself lives longer, by
    10,000 objects at most; everything else is freed at once, as always. A longer interval that was set before stays.
    """
    gc.set_threshold(
        max(gc.get_threshold()[0], _EVERY_OBJECTS),
        max(gc.get_threshold()[1], _EVERY_YOUNG),
        max(gc.get_threshold()[2], _EVERY_MIDDLE),
    )
