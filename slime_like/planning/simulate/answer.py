"""What a scenario is asked: every mode side by side, where the next GPU goes, and when async loses."""

from __future__ import annotations

import dataclasses

from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.scenario import ABORT, FULL, MODES, OFF, ONE_STEP, RETRACT, Scenario
from slime_like.planning.simulate.simulation import simulate

#: Splits of the GPUs between trainer and engines that are tried at most.
_SPLITS = 12
#: A gain below this is none: the draws of so few steps do not tell it from chance.
_NOTICEABLE = 0.02

COLOCATED = "off, colocated"


@dataclasses.dataclass(frozen=True)
class ModeRow:
    """One mode on one placement. gain: seconds of the first row's step over this one's."""

    name: str
    scenario: Scenario
    outcome: Outcome
    gain: float

    def to_dict(self) -> dict:
        """For JSON."""
        placement = {
            "engines": self.scenario.engines.num_engines,
            "trainer_gpus": self.scenario.trainer.num_gpus,
            "colocated": self.scenario.colocated,
        }
        return {"name": self.name, "gain": self.gain} | placement | self.outcome.to_dict()


@dataclasses.dataclass(frozen=True)
class NextGpu:
    """What more GPUs would do to one mode. Ratios of a step's seconds after to before: below 1 is faster."""

    mode: str
    num_gpus: int  # of the one engine more
    with_engine: float
    with_trainer: float  # as many GPUs more for the trainer
    shared: bool  # colocated: they serve both

    @property
    def where(self) -> str:
        """ "engines", "trainer", "both", or "nowhere" if no step gets noticeably faster."""
        if min(self.with_engine, self.with_trainer) > 1 - _NOTICEABLE:
            return "nowhere"
        if self.shared:
            return "both"
        return "engines" if self.with_engine <= self.with_trainer else "trainer"

    def to_dict(self) -> dict:
        """For JSON."""
        return dataclasses.asdict(self) | {"where": self.where}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All modes of one scenario. The first row is mode off as it is placed."""

    rows: tuple[ModeRow, ...]
    next_gpus: tuple[NextGpu, ...]
    reasons: tuple[str, ...]  # why async gains no more, or loses

    @property
    def best(self) -> ModeRow:
        """The fastest; of those that are as fast, to 2 %, the one that stands first: it is the simplest."""
        fastest = min(row.outcome.step_s for row in self.rows)
        return next(row for row in self.rows if row.outcome.step_s <= fastest * (1 + _NOTICEABLE))

    @property
    def verdict(self) -> str:
        """One line."""
        first, best = self.rows[0], self.best
        others = [row for row in self.rows if row.outcome.mode != OFF]
        if not others:
            step = _s(first.outcome.step_s)
            return f"async needs GPUs of both sides' own: {first.scenario.num_gpus} is too few; off takes {step} a step"
        fastest = min(others, key=lambda row: row.outcome.step_s)
        if best.outcome.mode == OFF:
            ratio = fastest.outcome.step_s / best.outcome.step_s
            return (
                f"async does not pay: {best.name} takes {_s(best.outcome.step_s)} a step, {fastest.name}"
                f" {_s(fastest.outcome.step_s)} ({ratio:.2f}x)"
            )
        held = {"engines": "generation", "trainer": "training"}[best.outcome.bottleneck]
        return (
            f"{best.name} is {best.gain:.2f}x as fast as {first.name}: {_s(best.outcome.step_s)} a step against"
            f" {_s(first.outcome.step_s)}; then {held} sets the pace (engines idle {best.outcome.engines_idle:.0%},"
            f" trainer {best.outcome.trainer_idle:.0%})"
        )

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "best": self.best.name,
            "modes": [row.to_dict() for row in self.rows],
            "next_gpu": [more.to_dict() for more in self.next_gpus],
            "reasons": list(self.reasons),
        }


def compare(scenario: Scenario, *, exact_samples: int | None = None, next_gpu: bool = True) -> Comparison:
    """Every mode on the same GPUs.

    Disaggregated: as placed, and mode off colocated on all of them. Colocated: mode off as placed, and the async modes
    on the best of several splits.
    """
    budget = {} if exact_samples is None else {"exact_samples": exact_samples}
    variants = {mode: _in_mode(scenario, mode) for mode in MODES}
    rows: list[tuple[str, Scenario, Outcome]] = []
    for mode, variant in variants.items():
        if mode != OFF and scenario.colocated:
            split = best_split(variant, scenario.num_gpus, **budget)
            if split is None:
                continue
            name = f"{mode}, {split[0].trainer.num_gpus} + {split[0].num_gpus - split[0].trainer.num_gpus} GPUs"
            rows.append((name, *split))
        else:
            rows.append((mode, variant, simulate(variant, **budget)))
    if not scenario.colocated:
        together = colocated(scenario)
        rows.insert(1, (COLOCATED, together, simulate(together, **budget)))
    first = rows[0][2].step_s
    table = tuple(ModeRow(name, variant, outcome, first / outcome.step_s) for name, variant, outcome in rows)
    more = [_next_gpu(row, budget) for row in table if next_gpu and row.name != COLOCATED]
    return Comparison(table, tuple(more), tuple(_reasons(table)))


def best_split(scenario: Scenario, num_gpus: int, **budget) -> tuple[Scenario, Outcome] | None:
    """The fastest of up to 12 splits of the GPUs between the trainer and engines; None if there is but one engine's.

    The work of training is taken to divide over any number of GPUs.
    """
    size = scenario.engines.gpus_per_engine
    most = (num_gpus - 1) // size  # engines, if one GPU is left
    counts = sorted({max(1, round(1 + i * (most - 1) / (_SPLITS - 1))) for i in range(_SPLITS)}) if most >= 1 else []
    best: tuple[Scenario, Outcome] | None = None
    for count in counts:
        split = scenario.with_engines(num_engines=count).with_trainer_gpus(num_gpus - count * size)
        outcome = simulate(split, **budget)
        if best is None or outcome.step_s < best[1].step_s:
            best = split, outcome
    return best


def colocated(scenario: Scenario) -> Scenario:
    """Mode off with the trainer on all GPUs, and engines on as many of them as whole engines fit."""
    gpus = scenario.num_gpus
    engines = max(1, gpus // scenario.engines.gpus_per_engine)
    together = _in_mode(scenario, OFF).with_trainer_gpus(gpus).with_engines(num_engines=engines)
    return dataclasses.replace(together, colocated=True).with_rules(contention=0.0)


def _in_mode(scenario: Scenario, mode: str) -> Scenario:
    """The scenario in another mode, without what that mode has not."""
    if mode == OFF:
        return scenario.with_rules(mode=OFF)
    apart = dataclasses.replace(scenario, colocated=False)
    return apart.with_rules(mode=mode, over_sampling=None, partial=False)


def _next_gpu(row: ModeRow, budget: dict) -> NextGpu:
    """One engine more, against as many GPUs more for the trainer; colocated GPUs are more of both."""
    scenario, size = row.scenario, row.scenario.engines.gpus_per_engine
    if scenario.colocated:
        more = scenario.with_engines(num_engines=scenario.engines.num_engines + 1)
        more = more.with_trainer_gpus(scenario.trainer.num_gpus + size)
        ratio = simulate(more, **budget).step_s / row.outcome.step_s
        return NextGpu(row.name, size, ratio, ratio, shared=True)
    engines = scenario.with_engines(num_engines=scenario.engines.num_engines + 1)
    trainer = scenario.with_trainer_gpus(scenario.trainer.num_gpus + size)
    before = row.outcome.step_s
    after = [simulate(variant, **budget).step_s / before for variant in (engines, trainer)]
    return NextGpu(row.name, size, after[0], after[1], shared=False)


def _reasons(rows: tuple[ModeRow, ...]) -> list[str]:
    """What holds the async modes back, with its numbers."""
    reasons = []
    first = rows[0]
    for row in rows:
        outcome, rules = row.outcome, row.scenario.rules
        if outcome.mode == OFF:
            continue
        if outcome.step_s > first.outcome.step_s * (1 + _NOTICEABLE):
            reasons.append(f"{row.name} loses: {outcome.step_s / first.outcome.step_s:.2f}x {first.name}'s step")
        if rules.contention:
            reasons.append(
                f"{row.name}: engines and trainer share processors; together each takes {1 + rules.contention:.2g}x"
                " as long"
            )
        lost = outcome.lost_tokens / outcome.decoded_tokens if outcome.decoded_tokens else 0.0
        if lost > _NOTICEABLE:
            dropped = ", ".join(f"{reason} {count}" for reason, count in outcome.dropped.items())
            reasons.append(
                f"{row.name}: {lost:.0%} of the generated tokens are thrown away ({dropped or 'none dropped'},"
                f" made anew {outcome.requeued})"
            )
        again = outcome.again_tokens * row.scenario.engines.prefill_s / row.scenario.engines.num_engines
        share = again / (outcome.step_s * outcome.steps)
        if rules.pause_mode in (RETRACT, ABORT) and share > _NOTICEABLE:
            reasons.append(
                f"{row.name}: {share:.0%} of the engines' time computes KV anew after syncs ({rules.pause_mode})"
            )
        if outcome.engines_sync > 0.1:
            reasons.append(f"{row.name}: engines stand for {outcome.engines_sync:.0%} of the time, in syncs")
        if outcome.mode == ONE_STEP and outcome.engines_idle > 0.2 and outcome.trainer_idle > 0.2:
            reasons.append(
                f"{row.name}: both sides wait, the trainer for each batch's slowest answer (idle"
                f" {outcome.trainer_idle:.0%}), engines beside it with few requests (idle {outcome.engines_idle:.0%})"
            )
        if outcome.mode == FULL and outcome.staleness_max >= 1:
            reasons.append(
                f"{row.name}: what is trained on is {outcome.staleness_mean:.2g} steps old on the average, at most"
                f" {outcome.staleness_max}"
            )
    together = next((row for row in rows if row.name == COLOCATED), None)
    fastest = min((row for row in rows if row.outcome.mode != OFF), key=lambda row: row.outcome.step_s, default=None)
    if together is not None and fastest is not None and together.outcome.step_s < fastest.outcome.step_s:
        reasons.append(
            f"{fastest.name} loses against all {together.scenario.num_gpus} GPUs in turns:"
            f" {fastest.outcome.step_s / together.outcome.step_s:.2f}x its step. The split leaves one side waiting, or"
            " turns cost little here"
        )
    return reasons


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
