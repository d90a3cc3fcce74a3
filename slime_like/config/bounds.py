"""What a number that somebody typed may be: finite, and within the bounds that its declaration gives."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

#: Whole numbers without a bound of their own end here: what indexes, sizes and seeds can be everywhere.
LARGEST_INT = 2**31 - 1
#: The longest deadline, a year: C's timers overflow not far beyond.
LONGEST_WAIT_S = 31_536_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a number. least, most: may be reached; above, below: may not.

    Example: Bounds(above=0, most=1).problem(0.0) -> "must be above 0 and at most 1"
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def problem(self, value: int | float) -> str:
        """What a number must be and is not; "" if it fits. NaN and infinity never do, nor a whole number beyond 2^31
        without a bound of its own.
        """
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        limits = (
            ("at least", self.least, self.least is None or value >= self.least),
            ("above", self.above, self.above is None or value > self.above),
            ("at most", self.most, self.most is None or value <= self.most),
            ("below", self.below, self.below is None or value < self.below),
        )
        if not all(holds for _, _, holds in limits):
            return "must be " + " and ".join(f"{word} {limit}" for word, limit, _ in limits if limit is not None)
        if isinstance(value, int) and self.most is None and self.below is None and abs(value) > LARGEST_INT:
            return f"must be at most {LARGEST_INT}" if value > 0 else f"must be at least {-LARGEST_INT}"
        return ""


def bounded(kind: type, **limits: float) -> Callable[[str], int | float]:
    """A number for argparse's `type=`, within Bounds(**limits). Example: bounded(int, least=0, most=65535)"""
    bounds = Bounds(**limits)

    def convert(text: str) -> int | float:
        value = kind(text)
        if problem := bounds.problem(value):
            raise argparse.ArgumentTypeError(f"{text!r} {problem}")
        return value

    convert.__name__ = kind.__name__  # argparse's word for text that is no number
    return convert
