"""The synchronous loop: generate -> score -> train -> sync, one after the other."""

from __future__ import annotations

from slime_like.job.phases import Phases
from slime_like.job.running import Job
from slime_like.loops.schedule import evaluates_after, evaluates_before, saves_after
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.observability.tracing import PhaseTrace


def run(job: Job, log: MetricsLog, console: ProgressConsole) -> None:
    """All rollout steps of a job, from where its checkpoint stopped."""
    phases = Phases(job, log, console, PhaseTrace(job.run.trace))
    first, last = phases.restore(), job.num_rollout
    phases.begin_step(first)
    seconds = {f"start/{part.replace(' ', '_')}_seconds": taken for part, taken in job.start_seconds.items()}
    log.log("start", first, seconds)
    console.note("started in " + ", ".join(f"{part} {taken:.1f} s" for part, taken in job.start_seconds.items()))
    if first >= last:
        console.note(f"nothing to do: {first} of {last} rollouts are done (--num-rollout)")
        return
    if job.engines is not None and job.trainer is not None:
        phases.sync(first)
    if evaluates_before(job, first):
        phases.evaluate(first)
    for step in range(first, last):
        _step(job, phases, step)
    phases.finish_save(wait=True)


def _step(job: Job, phases: Phases, step: int) -> None:
    phases.begin_step(step)
    done = step + 1
    if job.trainer is None:
        metrics = phases.generate(step)[1]
    else:
        samples, metrics = phases.train_samples(step)
        if job.engines is not None:
            phases.release()
        phases.finish_save(wait=False)
        metrics |= phases.train(step, samples)[1]
        if saves_after(job, done):
            phases.save(done)
        if job.engines is not None:
            phases.sync(done)
    if evaluates_after(job, done):
        phases.evaluate(done)
    seconds = phases.timers.finish_step()
    phases.log.log("step", step, seconds)
    phases.console.step(step, metrics | seconds)
