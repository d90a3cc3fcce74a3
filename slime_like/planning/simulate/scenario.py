"""What is simulated: the work, the engines, the trainer, and the rules of a mode."""

from __future__ import annotations

import dataclasses
import math

from slime_like.errors import ConfigError
from slime_like.planning.simulate.spread import Spread

OFF, ONE_STEP, FULL = MODES = ("off", "one-step", "full")
RETRACT, KEEP, ABORT = PAUSE_MODES = ("retract", "keep", "abort")
WAIT, DROP, REQUEUE, TRAIN = STALE_POLICIES = ("wait", "drop", "requeue", "train")
BY_AGE, BY_PROMPT, BY_FINISH = ORDERS = ("age", "prompt", "finish")

_ZERO, _ONE = Spread.constant(0), Spread.constant(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What one train step consumes, and what one answer takes beside tokens."""

    batch: int = 32  # groups a train step
    group_size: int = 8  # samples a group
    response_tokens: Spread = Spread.constant(512)  # of all turns of a sample together
    prompt_tokens: float = 0.0  # of a sample; they are prefilled and trained on
    turns: Spread = _ONE  # of a sample; between two turns stands one call of the environment
    environment_s: Spread = _ZERO  # of one call
    observation_tokens: float = 0.0  # what the environment adds between two turns
    reward_s: Spread = _ZERO  # of a sample, after its last token
    filtered_share: float = 0.0  # of the groups: dropped when they are done (dynamic sampling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePace:
    """How fast engines are: one decode step gives every running request a token.

    decode step = base_s + per_request_s x running requests; a prefill stalls the engine for its tokens x prefill_s.
    """

    num_engines: int = 1
    slots: int = 256  # most running requests of an engine; the rest waits
    base_s: float = 0.02
    per_request_s: float = 0.0
    prefill_s: float = 0.0  # of one token
    gpus_per_engine: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerPace:
    """How long a train step and a sync take.

    Training: fixed_s + tokens x per_token_s; more GPUs divide the second, not the first.
    """

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    overhead_s: float = 0.0  # of the driver, a step, in which nothing else of the trainer's runs
    sync_s: Spread = _ZERO
    pause_share: float = 1.0  # of a sync, its end: engines stand; before that, in `full`, they go on
    abort_s: float = 1.0  # what a sync with pause mode abort takes more
    num_gpus: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncRules:
    """Who may begin when, and what becomes of what is late.

    num_workers: groups that are made at a time, in `full`; None: as many as the capacity rule lets.
    order: of what is done, groups are trained by age (the oldest weights first), strictly in the prompts' order, or as
    they finish (which prefers short answers).
    stale_policy: by age, `wait` waits for an older group where what is left could else not all be trained on in time.
    contention: engines and the trainer, while both run, each take 1 + contention times as long: 0 where they share
    nothing, 1 where they share one processor.
    """

    mode: str = OFF
    max_staleness: int = 1  # train steps, in `full`
    stale_policy: str = WAIT
    num_workers: int | None = None
    order: str = BY_AGE
    pause_mode: str = RETRACT
    sync_interval: int = 1  # train steps between two syncs
    over_sampling: int | None = None  # groups begun for a batch, in `off`; the batch is full before all are done
    partial: bool = False  # what is begun then is kept for the next batch; else thrown away
    contention: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run to simulate: `steps` train steps are counted after `warm_up` others."""

    work: Workload = Workload()
    engines: EnginePace = EnginePace()
    trainer: TrainerPace = TrainerPace()
    rules: AsyncRules = AsyncRules()
    colocated: bool = False  # engines have the trainer's GPUs, in turns
    steps: int = 10
    warm_up: int = 2
    seed: int = 0

    @property
    def samples_a_step(self) -> int:
        """Samples that one train step consumes."""
        return self.work.batch * self.work.group_size

    @property
    def num_gpus(self) -> int:
        """All GPUs of the run."""
        engines = self.engines.num_engines * self.engines.gpus_per_engine
        return max(engines, self.trainer.num_gpus) if self.colocated else engines + self.trainer.num_gpus

    @property
    def settled_after(self) -> int:
        """Train steps that are not counted: a buffer of several batches must have filled."""
        return max(self.warm_up, self.rules.max_staleness + 1 if self.rules.mode == FULL else 0)

    def with_rules(self, **changes) -> Scenario:
        """The same under other rules."""
        return dataclasses.replace(self, rules=dataclasses.replace(self.rules, **changes))

    def with_engines(self, **changes) -> Scenario:
        """The same with other engines."""
        return dataclasses.replace(self, engines=dataclasses.replace(self.engines, **changes))

    def with_trainer(self, **changes) -> Scenario:
        """The same with another trainer."""
        return dataclasses.replace(self, trainer=dataclasses.replace(self.trainer, **changes))

    def with_work(self, **changes) -> Scenario:
        """The same with other work."""
        return dataclasses.replace(self, work=dataclasses.replace(self.work, **changes))

    def with_trainer_gpus(self, num_gpus: int) -> Scenario:
        """The same with the work of training spread over another number of GPUs."""
        per_token = self.trainer.per_token_s * self.trainer.num_gpus / num_gpus
        return self.with_trainer(num_gpus=num_gpus, per_token_s=per_token)

    def to_dict(self) -> dict:
        """As JSON can hold it; `from_dict` reads it."""
        return dataclasses.asdict(self, dict_factory=_without_infinity)

    @classmethod
    def from_dict(cls, fields: dict) -> Scenario:
        """The scenario of `to_dict`. Raises ConfigError for fields that there are not."""
        groups = {"work": Workload, "engines": EnginePace, "trainer": TrainerPace, "rules": AsyncRules}
        read: dict = {}
        try:
            for name, value in fields.items():
                read[name] = groups[name](**_with_spreads(value)) if name in groups else value
            return cls(**read)
        except TypeError as error:
            raise ConfigError([f"no scenario of this version: {error}"]) from None

    def check(self) -> None:
        """Raises ConfigError with everything that is impossible."""
        problems = [*_number_problems(self), *_rule_problems(self)]
        if problems:
            raise ConfigError(problems)


def _without_infinity(pairs: list[tuple[str, object]]) -> dict:
    return {name: None if value == math.inf else value for name, value in pairs}


def _with_spreads(fields: dict) -> dict:
    """A group's fields; a distribution is an object with its kind."""
    return {
        name: Spread(value["kind"], tuple(value["values"]), math.inf if value["limit"] is None else value["limit"])
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _number_problems(scenario: Scenario) -> list[str]:
    work, engines, trainer, rules = scenario.work, scenario.engines, scenario.trainer, scenario.rules
    counts = {
        "--batch": work.batch, "--group-size": work.group_size, "--engines": engines.num_engines,
        "--slots": engines.slots, "--gpus-per-engine": engines.gpus_per_engine, "--trainer-gpus": trainer.num_gpus,
        "--steps": scenario.steps, "--sync-interval": rules.sync_interval,
    }  # fmt: skip
    if rules.num_workers is not None:
        counts["--workers"] = rules.num_workers
    amounts = {
        "--prompt-tokens": work.prompt_tokens, "--observation-tokens": work.observation_tokens,
        "--decode-base": engines.base_s, "--decode-per-request": engines.per_request_s, "--prefill": engines.prefill_s,
        "--train-fixed": trainer.fixed_s, "--train-per-token": trainer.per_token_s, "--overhead": trainer.overhead_s,
        "--abort-seconds": trainer.abort_s, "--contention": rules.contention, "--warm-up": scenario.warm_up,
        "--max-staleness": rules.max_staleness,
    }  # fmt: skip
    problems = [f"{flag} {value}: must be at least 1." for flag, value in counts.items() if value < 1]
    problems += [
        f"{flag} {value:g}: must not be negative." for flag, value in amounts.items() if not 0 <= value < math.inf
    ]
    if engines.base_s + engines.per_request_s <= 0:
        problems.append("--decode-base and --decode-per-request are both 0: an engine would be infinitely fast.")
    if not 0 <= trainer.pause_share <= 1:
        problems.append(f"--pause-share {trainer.pause_share:g}: must be from 0 to 1.")
    if not 0 <= work.filtered_share < 1:
        problems.append(f"--filtered-share {work.filtered_share:g}: must be at least 0 and below 1.")
    if work.turns.lowest < 1:
        problems.append(f"--turns {work.turns}: must be at least 1.")
    return problems


def _rule_problems(scenario: Scenario) -> list[str]:
    rules, problems = scenario.rules, []
    for flag, value, known in (
        ("--async-mode", rules.mode, MODES),
        ("--pause-mode", rules.pause_mode, PAUSE_MODES),
        ("--stale-policy", rules.stale_policy, STALE_POLICIES),
        ("--order", rules.order, ORDERS),
    ):
        if value not in known:
            problems.append(f"{flag} {value} is unknown. Known: {', '.join(known)}.")
    if rules.mode == FULL and rules.max_staleness < rules.sync_interval - 1:
        problems.append(
            f"--max-staleness {rules.max_staleness} with --sync-interval {rules.sync_interval}: the last batch before"
            f" a sync is {rules.sync_interval - 1} steps old. Fix: --max-staleness {rules.sync_interval - 1}."
        )
    if rules.order == BY_FINISH and rules.stale_policy == WAIT:
        problems.append("--order finish waits for nobody. Fix: --stale-policy drop, requeue or train.")
    if rules.over_sampling is not None and rules.over_sampling < scenario.work.batch:
        problems.append(f"--over-sampling {rules.over_sampling} is below --batch {scenario.work.batch}.")
    if rules.over_sampling is not None and rules.mode != OFF:
        problems.append("--over-sampling is of mode off: elsewhere the next groups are begun before they are needed.")
    if rules.partial and rules.over_sampling is None:
        problems.append("--partial-rollout does nothing without --over-sampling. Fix: add it.")
    if scenario.colocated and rules.mode != OFF:
        problems.append(f"--colocated with --async-mode {rules.mode}: on shared GPUs the sides take turns.")
    return problems
