"""The loop over rollout steps: generate -> score -> train -> sync.

One after the other; with --async-mode one-step the next rollout is generated meanwhile, and with full the rollout side
never stops, so that its groups are only taken here, and weights change under it.
"""

from __future__ import annotations

from slime_like.errors import RunError
from slime_like.job.phases import Phases
from slime_like.job.preemption import STATUS, Preempted
from slime_like.job.running import Job
from slime_like.loops.schedule import evaluates_after, evaluates_before, saves_after, syncs_after
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.observability.tracing import PhaseTrace
from slime_like.utils.full_disk import LOST_WRITES


def run(job: Job, log: MetricsLog, console: ProgressConsole) -> None:
    """All rollout steps of a job, from where its checkpoint stopped, and again from there when a training rank is lost.

    Raises SystemExit(143) when the run was preempted and has saved.
    """
    while True:
        phases = Phases(job, log, console, PhaseTrace(job.run.trace))
        try:
            _run_preemptible(job, phases)
            return
        except RunError as error:
            if job.restart_trainer is None or phases.preemption.is_asked:
                raise
            for note in job.restart_trainer(error):
                console.note(note)


def _run_preemptible(job: Job, phases: Phases) -> None:
    if not job.config.checkpoint.save or job.trainer is None:
        _run(job, phases)
        return
    with phases.preemption.listening():
        try:
            _run(job, phases)
        except Preempted as asked:
            phases.save_before_end(str(asked))
            raise SystemExit(STATUS) from None


def _run(job: Job, phases: Phases) -> None:
    log, console = phases.log, phases.console
    first, last = phases.restore(), job.num_rollout
    phases.begin_step(first)
    seconds = {f"start/{part.replace(' ', '_')}_seconds": taken for part, taken in job.start_seconds.items()}
    log.log("start", first, seconds)
    console.note("started in " + ", ".join(f"{part} {taken:.1f} s" for part, taken in job.start_seconds.items()))
    if first >= last and not job.resolved.ends_only:
        console.note(f"nothing to do: {first} of {last} rollouts are done (--num-rollout)")
        return
    if job.engines is not None and job.trainer is not None:
        phases.sync(first)
    if evaluates_before(job, first):
        phases.evaluate(first)
    for step in range(first, last):
        _step(job, phases, step)
    phases.finish_evaluate()
    phases.finish_save(wait=True)


def _step(job: Job, phases: Phases, step: int) -> None:
    phases.begin_step(step)
    done, runs_ahead = step + 1, job.config.asynchrony.async_mode == "one-step"
    if job.trainer is None:
        metrics = phases.generate(step)[1]
    else:
        samples, metrics = phases.train_samples(step)
        if runs_ahead:
            phases.begin_generate(done)
        if job.engines is not None:
            phases.release()
        phases.finish_save(wait=False)
        phases.finish_evaluate(wait=False)
        metrics |= phases.train(step, samples)[1]
        phases.preemption.check()
        if saves_after(job, done):
            phases.save(done)
            phases.preemption.check()
        if evaluates_after(job, done):
            phases.finish_evaluate()  # before the sync, which brings the weights of the next one to its engines too
        if syncs_after(job, done):
            if runs_ahead:
                phases.settle_generation()
            phases.sync(done)
            phases.preemption.check()
            if runs_ahead:
                phases.begin_generate(done + 1)  # beside an evaluation, too
    if evaluates_after(job, done):
        phases.evaluate(done)
    seconds = phases.timers.finish_step()
    if job.config.asynchrony.is_async:
        seconds["async/trainer_idle_seconds"] = seconds["step/generate_seconds"]
    lost = {"step/failed_saves": phases.saves.num_failed, "step/lost_writes": LOST_WRITES.total}
    seconds |= {name: float(count) for name, count in lost.items() if count}
    phases.log.log("step", step, seconds)
    phases.console.step(step, metrics | seconds)
