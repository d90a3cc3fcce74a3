"""How a quantity is spread: constant, between two numbers, log-normal, or as it was measured."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from slime_like.errors import UserError

#: z of the 95th percentile of a normal distribution.
_Z95 = 1.6448536269514722


@dataclasses.dataclass(frozen=True)
class Spread:
    """A distribution of numbers that are not negative.

    kind: "constant" (values: the number), "uniform" (lowest, highest), "lognormal" (mean, 95th percentile) or
    "measured" (every value seen, drawn from with replacement). limit: what is drawn above it counts as it.
    Example: Spread.parse("600~1800") has mean 600, and one draw in twenty is above 1800.
    """

    kind: str
    values: tuple[float, ...]
    limit: float = math.inf

    @classmethod
    def constant(cls, value: float) -> Spread:
        """Always this."""
        return cls("constant", (float(value),))

    @classmethod
    def parse(cls, text: str, name: str = "value") -> Spread:
        """`600`, `16-64` or `600~1800` (mean ~ 95th percentile). Raises UserError for anything else."""
        mark, kind = ("~", "lognormal") if "~" in text else ("-", "uniform") if "-" in text else ("", "constant")
        try:
            numbers = tuple(float(part) for part in (text.split(mark) if mark else [text]))
        except ValueError:
            numbers = ()
        if len(numbers) != (1 if kind == "constant" else 2) or not all(0 <= x < math.inf for x in numbers):
            raise UserError(f"{name} {text}: give a number, lowest-highest, or mean~95th percentile.")
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise UserError(f"{name} {text}: the first number must not be above the second.")
        spread = cls(kind, numbers)
        if kind == "lognormal" and spread._sigma() is None:
            raise UserError(
                f"{name} {text}: a log-normal's 95th percentile lies between its mean and 3.87 times its mean."
            )
        return spread

    def __str__(self) -> str:
        if self.kind == "measured":
            return f"measured ({len(self.values)} values, mean {np.mean(self.values):.4g})"
        return {"constant": "", "uniform": "-", "lognormal": "~"}[self.kind].join(f"{x:g}" for x in self.values)

    def _sigma(self) -> float | None:
        """Of the log-normal's logarithm: mean = exp(mu + s^2/2), p95 = exp(mu + z s); None if there is none.

        ln(p95 / mean) = z s - s^2 / 2, of which the smaller root is meant.
        """
        mean, p95 = self.values
        if mean <= 0 or p95 < mean:
            return None
        inside = _Z95**2 - 2 * math.log(p95 / mean)
        return None if inside < 0 else _Z95 - math.sqrt(inside)

    @property
    def is_constant(self) -> bool:
        """Whether every draw is the same."""
        return self.kind == "constant" or self.lowest == self.highest

    @property
    def lowest(self) -> float:
        """No draw is below it."""
        return 0.0 if self.kind == "lognormal" else min(min(self.values), self.limit)

    @property
    def highest(self) -> float:
        """No draw is above it."""
        return self.limit if self.kind == "lognormal" else min(max(self.values), self.limit)

    @property
    def mean(self) -> float:
        """Of what is drawn; of a log-normal before its limit."""
        if self.kind == "lognormal":
            return self.values[0]
        return float(np.mean(np.minimum(self.values, self.limit)))

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of this shape, float64."""
        if self.kind == "constant":
            numbers = np.full(shape, self.values[0])
        elif self.kind == "uniform":
            numbers = generator.uniform(self.values[0], self.values[1], size=shape)
        elif self.kind == "lognormal":
            sigma = self._sigma()
            assert sigma is not None, "parse refuses it"
            numbers = np.exp(math.log(self.values[0]) - sigma**2 / 2 + sigma * generator.standard_normal(shape))
        else:
            numbers = generator.choice(np.array(self.values), size=shape)
        return np.minimum(numbers, self.limit)
