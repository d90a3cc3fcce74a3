"""One quantity changed over a range, every mode at each value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from slime_like.errors import UserError
from slime_like.planning.simulate.answer import Comparison, compare
from slime_like.planning.simulate.scenario import Scenario
from slime_like.planning.simulate.spread import Spread


def _scaled(scenario: Scenario, factor: float) -> Scenario:
    """Engines, trainer's GPUs and batch, all that many times as many."""
    whole = max(1, round(factor))
    bigger = scenario.with_engines(num_engines=scenario.engines.num_engines * whole)
    bigger = bigger.with_trainer_gpus(scenario.trainer.num_gpus * whole)
    workers = scenario.rules.num_workers
    bigger = bigger.with_rules(num_workers=None if workers is None else workers * whole)
    return bigger.with_work(batch=scenario.work.batch * whole)


#: What can be swept -> the scenario with that value.
QUANTITIES: dict[str, Callable[[Scenario, float], Scenario]] = {
    "scale": _scaled,
    "engines": lambda scenario, value: scenario.with_engines(num_engines=round(value)),
    "slots": lambda scenario, value: scenario.with_engines(slots=round(value)),
    "trainer-gpus": lambda scenario, value: scenario.with_trainer_gpus(round(value)),
    "batch": lambda scenario, value: scenario.with_work(batch=round(value)),
    "response-tokens": lambda scenario, value: _lengthened(scenario, value),
    "environment-seconds": lambda scenario, value: scenario.with_work(environment_s=Spread.constant(value)),
    "reward-seconds": lambda scenario, value: scenario.with_work(reward_s=Spread.constant(value)),
    "sync-seconds": lambda scenario, value: scenario.with_trainer(sync_s=Spread.constant(value)),
    "max-staleness": lambda scenario, value: scenario.with_rules(max_staleness=round(value)),
    "contention": lambda scenario, value: scenario.with_rules(contention=value),
}
_COUNTS = ("scale", "engines", "slots", "trainer-gpus", "batch", "max-staleness")


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """All modes at one value."""

    value: float
    comparison: Comparison


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """`engines=1,2,8`, or `engines=1..10000` for doublings and the end itself. Raises UserError."""
    name, _, values = text.partition("=")
    if name not in QUANTITIES:
        raise UserError(f"--sweep {text}: {name!r} cannot be swept. Known: {', '.join(QUANTITIES)}.")
    try:
        numbers = _doublings(*map(float, values.split(".."))) if ".." in values else _listed(values)
    except (TypeError, ValueError):
        raise UserError(f"--sweep {text}: give {name}=1,2,4 or {name}=1..1000.") from None
    if name in _COUNTS and any(number != round(number) for number in numbers):
        raise UserError(f"--sweep {text}: {name} is counted in whole numbers.")
    return name, numbers


def sweep(scenario: Scenario, name: str, values: Sequence[float]) -> list[SweepPoint]:
    """Every mode at every value. Raises ConfigError for a value that is impossible."""
    return [SweepPoint(value, compare(QUANTITIES[name](scenario, value), next_gpu=False)) for value in values]


def _listed(values: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in values.split(","))
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(values)
    return numbers


def _doublings(first: float, last: float) -> tuple[float, ...]:
    if not 0 < first <= last < math.inf:
        raise ValueError(f"{first}..{last}")
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return (*numbers, last) if last > first else (first,)


def _lengthened(scenario: Scenario, mean: float) -> Scenario:
    """Responses of another mean, spread as before."""
    spread = scenario.work.response_tokens
    ratio = mean / spread.mean
    longer = dataclasses.replace(
        spread, values=tuple(value * ratio for value in spread.values), limit=spread.limit * ratio
    )
    return scenario.with_work(response_tokens=longer)
