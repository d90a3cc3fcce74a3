"""A scenario from what a run measured: its run directory's metrics, logged answers, config and plan."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from slime_like.errors import DataError
from slime_like.planning.simulate.scenario import (
    ABORT,
    FULL,
    KEEP,
    OFF,
    RETRACT,
    WAIT,
    AsyncRules,
    EnginePace,
    Scenario,
    TrainerPace,
    Workload,
)
from slime_like.planning.simulate.simulation import simulate
from slime_like.planning.simulate.spread import Spread
from slime_like.utils.files import RunDirectory, read_json_lines

#: Logged answers of a rollout from which on their lengths are taken for the rollout's.
_ENOUGH_ANSWERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step of a run, in seconds and tokens."""

    step: int
    seconds: float
    generate_s: float
    train_s: float
    sync_s: float
    overhead_s: float
    generated_tokens: float
    longest_tokens: float
    train_tokens: float
    response_tokens: float  # of what was trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What a run directory says of its steps. Its first `skip` steps, which warm up, are left out."""

    path: str
    config: Mapping
    mode: str
    num_engines: int
    gpus_per_engine: int
    trainer_gpus: int
    colocated: bool
    steps: tuple[MeasuredStep, ...]
    lengths: tuple[float, ...]  # of logged answers; empty if too few were
    response_mean: float
    truncated_ratio: float
    turns_mean: float
    staleness_mean: float | None
    staleness_max: float | None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean([step.seconds for step in self.steps]))

    @property
    def batch(self) -> int:
        """Groups a train step."""
        return int(self.config["rollout"]["rollout_batch_size"])

    @property
    def group_size(self) -> int:
        """Samples a group."""
        return int(self.config["rollout"]["n_samples_per_prompt"])

    def part(self, begin: int, end: int | None = None) -> MeasuredRun:
        """The same with some of its steps only."""
        return dataclasses.replace(self, steps=self.steps[begin:end])


def read_run(path: str, *, skip: int = 1) -> MeasuredRun:
    """Raises DataError where the directory has no run, or too few whole steps."""
    run = RunDirectory(path)
    for file in (run.metrics, run.config, run.plan):
        if not file.is_file():
            raise DataError(f"{file}: no such file. Fix: give the directory of a run.")
    config, plan = (json.loads(file.read_text(encoding="utf-8")) for file in (run.config, run.plan))
    by_kind: dict[str, dict[int, dict]] = collections.defaultdict(dict)
    for record in read_json_lines(run.metrics):
        by_kind[record["kind"]][record["step"]] = record
    whole = sorted(set(by_kind["step"]) & set(by_kind["rollout"]) & set(by_kind["train"]))[skip:]
    if len(whole) < 2:
        raise DataError(f"{run.metrics}: {len(whole)} steps with rollout and train are left after the first {skip}.")
    steps = tuple(_step(number, by_kind) for number in whole)
    rollouts = [by_kind["rollout"][number] for number in whole]
    roles, engines = plan["roles"], plan["engines"]
    staleness = [by_kind["train"][number] | by_kind["rollout"][number] | by_kind["step"][number] for number in whole]
    return MeasuredRun(
        path=str(path),
        config=config,
        mode=_flags(config).get("async_mode", OFF),
        num_engines=max(1, len(engines)),
        gpus_per_engine=max(1, len(engines[0]["bundles"])) if engines else 1,
        trainer_gpus=roles["actor"]["num_gpus"] if "actor" in roles else 1,
        colocated=plan["mode"] == "colocate",
        steps=steps,
        lengths=_logged_lengths(run.samples, set(whole)),
        response_mean=_mean(rollouts, "rollout/response_tokens_mean"),
        truncated_ratio=_mean(rollouts, "rollout/truncated_ratio"),
        turns_mean=max(1.0, _mean(rollouts, "rollout/episodes/turns_mean", 1.0)),
        staleness_mean=_mean_or_none(staleness, "async/staleness_mean"),
        staleness_max=max((line["async/staleness_max"] for line in staleness if "async/staleness_max" in line),
                          default=None),
    )  # fmt: skip


def scenario_of(run: MeasuredRun, *, others: Sequence[MeasuredRun] = (), own_pace: bool = True) -> Scenario:
    """The scenario that gives this run's steps. own_pace: its own seconds say how fast engines and trainer are.

    Seconds of generating and training are fitted over the steps of this run and of `others`, which ran the same model
    on the same host with other batches or lengths. Fewest squares, nothing negative:
        generate = latency + base x longest answer + per request x tokens of an engine
        train    = fixed + per token x tokens
    What one decode step of a batch costs follows from the first, since the sum over decode steps of (base + per request
    x running) is that. Of several engines only the longest answer and the mean load are known: their fit is scaled so
    that a simulated rollout takes this run's mean seconds.
    """
    runs = (run, *others) if own_pace else tuple(others)
    for one in runs:
        if one.mode != OFF:
            raise DataError(
                f"{one.path} ran in --async-mode {one.mode}, where seconds of generating are the trainer's waiting."
                " Fix: the directory of a run in mode off, and --async-mode's rules as flags."
            )
    rows, seconds, train_rows, train_seconds = [], [], [], []
    for owner, step in [(each, step) for each in runs for step in each.steps]:
        rows.append((1.0, step.longest_tokens, step.generated_tokens / owner.num_engines))
        seconds.append(step.generate_s)
        train_rows.append((1.0, step.train_tokens * run.trainer_gpus / owner.trainer_gpus))
        train_seconds.append(step.train_s)
    latency, base, per_request = fit(np.array(rows), np.array(seconds))
    fixed, per_token = fit(np.array(train_rows), np.array(train_seconds))
    if base + per_request <= 0:  # nothing depends on tokens: too little varies
        base, latency = max(latency, 1e-9) / max(1.0, float(np.mean([row[1] for row in rows]))), 0.0
    slots = run.config["engine"]["sglang_server_concurrency"]
    prompt = np.mean([step.train_tokens - step.response_tokens for step in run.steps]) / (run.batch * run.group_size)
    scenario = Scenario(
        work=Workload(
            batch=run.batch,
            group_size=run.group_size,
            response_tokens=_lengths(run),
            prompt_tokens=max(0.0, float(prompt)),
            turns=Spread.constant(round(run.turns_mean)),
            reward_s=Spread.constant(latency),
        ),
        engines=EnginePace(
            num_engines=run.num_engines, slots=slots, base_s=base, per_request_s=per_request,
            gpus_per_engine=run.gpus_per_engine,
        ),
        trainer=TrainerPace(
            fixed_s=fixed,
            per_token_s=per_token,
            overhead_s=max(0.0, float(np.mean([step.overhead_s for one in runs for step in one.steps]))),
            sync_s=Spread("measured", tuple(step.sync_s for step in run.steps)),
            num_gpus=run.trainer_gpus,
        ),
        rules=_rules(run),
        colocated=run.colocated,
        steps=20,
    )  # fmt: skip
    if run.num_engines == 1 or not own_pace:
        return scenario
    return _as_fast_as(scenario, float(np.mean([step.generate_s for step in run.steps])))


def fit(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Factors [K] of the columns, as `not_negative`, to the steps that are like the others.

    A step in which the host did something else besides lies far off: it is left out where it is more than 4 times the
    median distance away from the fit. What is left out of at most a third of the steps is not made up for.
    """
    kept = np.ones(len(seconds), dtype=bool)
    for _ in range(4):
        factors = not_negative(rows[kept], seconds[kept])
        distance = np.abs(rows @ np.array(factors) - seconds)
        near = distance <= 4 * np.median(distance) + 0.02 * seconds
        if (near == kept).all() or near.sum() < 2 * len(seconds) / 3:
            break
        kept = near
    return factors


def not_negative(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Factors [K], none below 0, with the least squared error: the best of the fits by every subset of columns.

    rows: [N, K], seconds: [N]. A column more must be worth it (Bayesian information criterion, Schwarz 1978): with few
    noisy steps lengths and batches, which go together, would else share what only one of them costs.
    """
    count, num_columns = rows.shape
    best, least = (0.0,) * num_columns, math.inf
    floor = 1e-12 * float(np.sum(seconds**2)) + 1e-300  # of an exact fit
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            columns = list(chosen)
            scale = np.abs(rows[:, columns]).max(axis=0)
            if not scale.all():
                continue
            factors, _, rank, _ = np.linalg.lstsq(rows[:, columns] / scale, seconds, rcond=1e-9)
            if rank < size or (factors < 0).any():
                continue
            error = float(np.sum((rows[:, columns] / scale @ factors - seconds) ** 2))
            criterion = count * math.log(max(error, floor) / count) + size * math.log(count)
            if criterion < least:
                least, full = criterion, np.zeros(num_columns)
                full[columns] = factors / scale
                best = tuple(full.tolist())
    return best


def _as_fast_as(scenario: Scenario, generate_s: float) -> Scenario:
    """With the engines scaled so that a batch is generated in this time on the average."""
    alone = dataclasses.replace(scenario, trainer=TrainerPace(num_gpus=scenario.trainer.num_gpus), colocated=False)
    alone = dataclasses.replace(alone, steps=60)
    alone, latency = alone.with_rules(mode=OFF, over_sampling=None, partial=False), scenario.work.reward_s.mean
    decode_s = simulate(alone).step_s - latency
    ratio = (generate_s - latency) / decode_s if generate_s > latency else generate_s / (decode_s + latency)
    if generate_s <= latency:
        scenario = scenario.with_work(reward_s=Spread.constant(latency * ratio))
    pace = scenario.engines
    return scenario.with_engines(base_s=pace.base_s * ratio, per_request_s=pace.per_request_s * ratio)


def _flags(config: Mapping) -> dict:
    """A run's own words on its mode."""
    return {**config.get("rollout", {}), **config.get("sync", {}), **config.get("asynchrony", {})}


def _rules(run: MeasuredRun) -> AsyncRules:
    """Of the run's own flags, as far as it has them."""
    flags = _flags(run.config)
    pause = {"retract": RETRACT, "in_place": KEEP, "abort": ABORT}
    is_full, bound = run.mode == FULL, flags.get("max_staleness")
    partial = bool(flags.get("partial_rollout")) and not is_full
    slots = run.config["engine"]["sglang_server_concurrency"]
    return AsyncRules(
        mode=run.mode,
        max_staleness=1 if bound is None else int(bound),
        stale_policy=flags.get("stale_policy") or WAIT,
        sync_interval=int(flags.get("update_weights_interval") or 1),
        pause_mode=pause.get(flags.get("update_weight_pause_mode") or "retract", RETRACT),
        num_workers=max(1, slots * run.num_engines // run.group_size) if is_full else None,
        over_sampling=int(flags.get("over_sampling_batch_size") or run.batch) if partial else None,
        partial=partial,
    )


def _step(number: int, by_kind: Mapping[str, Mapping[int, dict]]) -> MeasuredStep:
    times, rollout, train = by_kind["step"][number], by_kind["rollout"][number], by_kind["train"][number]
    return MeasuredStep(
        step=number,
        seconds=times["step/seconds"],
        generate_s=times.get("step/generate_seconds", 0.0),
        train_s=times.get("step/train_seconds", 0.0),
        sync_s=times.get("step/sync_seconds", 0.0),
        overhead_s=times["step/overhead_seconds"],
        generated_tokens=rollout.get("rollout/generated_tokens", rollout["rollout/tokens"]),
        longest_tokens=rollout["rollout/response_tokens_max"],
        train_tokens=train["train/tokens"],
        response_tokens=rollout["rollout/tokens"],
    )


def _lengths(run: MeasuredRun) -> Spread:
    """Response lengths: as logged, else by what the metrics say of them."""
    if run.lengths:
        # Logged answers are chosen by reward: their mean is put right.
        ratio = run.response_mean / float(np.mean(run.lengths))
        return Spread("measured", tuple(length * ratio for length in run.lengths))
    longest = float(np.mean([step.longest_tokens for step in run.steps]))
    mean, cut = run.response_mean, min(run.truncated_ratio, 0.999)
    if longest - mean < 0.5:
        return Spread.constant(mean)
    # Truncated answers are as long as the longest, the others spread evenly around their own mean.
    short = max(1.0, (mean - cut * longest) / (1 - cut))
    reach = min(short - 1, longest - short) if cut * run.batch * run.group_size >= 1 else 0.0
    if reach <= 0:
        return _long_tailed(mean, longest, run.batch * run.group_size)
    num_cut = round(100 * cut)
    even = np.linspace(short - reach, short + reach, 100 - num_cut)
    return Spread("measured", (*even.tolist(), *[longest] * num_cut))


def _long_tailed(mean: float, longest: float, count: int) -> Spread:
    """Log-normal with this mean, whose largest of `count` draws is about `longest`: 100 quantiles and that one."""
    low, high, z = 0.0, 3.0, math.sqrt(2 * math.log(max(2, count)))
    for _ in range(60):
        sigma = (low + high) / 2
        if math.exp(sigma * z - sigma**2 / 2) * mean < longest and sigma < z:
            low = sigma
        else:
            high = sigma
    from statistics import NormalDist

    quantiles = [NormalDist().inv_cdf((i + 0.5) / max(100, count)) for i in range(max(100, count))]
    values = np.exp(low * np.array(quantiles))
    return Spread("measured", tuple((values * mean / values.mean()).tolist()), limit=longest)


def _logged_lengths(folder: Path, steps: set[int]) -> tuple[float, ...]:
    """Trained tokens of each logged answer, its segments together; none if the rollouts logged too few."""
    lengths: collections.Counter[tuple] = collections.Counter()
    for step in sorted(steps):
        path = folder / f"rollout-{step}.jsonl"
        if path.is_file():
            for line in read_json_lines(path):
                lengths[step, line["prompt_index"], line["sample_index"]] += line["trained_tokens"]
    return tuple(map(float, lengths.values())) if len(lengths) >= _ENOUGH_ANSWERS else ()


def _mean(records: Sequence[Mapping], name: str, default: float = 0.0) -> float:
    mean = _mean_or_none(records, name)
    return default if mean is None else mean


def _mean_or_none(records: Sequence[Mapping], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return float(np.mean(values)) if values else None
