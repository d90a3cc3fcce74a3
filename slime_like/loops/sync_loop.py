"""The synchronous loop: generate -> score -> train -> sync, one after the other."""

from __future__ import annotations

from slime_like.cluster.build import Job
from slime_like.loops.step import Phases
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog
from slime_like.observability.tracing import PhaseTrace


def run(job: Job, log: MetricsLog, console: ProgressConsole) -> None:
    """All rollout steps of a job, from where its checkpoint stopped."""
    phases = Phases(job, log, console, PhaseTrace(job.run.trace))
    first, last = phases.restore(), job.config.data.num_rollout
    phases.begin_step(first)
    log.log("start", first, {f"start/{part.replace(' ', '_')}_seconds": seconds for part, seconds in job.start_seconds.items()})
    console.note("started in " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in job.start_seconds.items()))
    if first >= last:
        console.note(f"nothing to do: {first} of {last} rollouts are done (--num-rollout)")
        return
    if job.engines is not None and job.train is not None:
        phases.sync(first)
    if _evaluates(job, first) and not (first == 0 and job.config.eval.skip_eval_before_train):
        phases.evaluate(first)
    for step in range(first, last):
        _step(job, phases, step)
    phases.finish_save(wait=True)


def _step(job: Job, phases: Phases, step: int) -> None:
    phases.begin_step(step)
    done = step + 1
    if job.train is None:
        metrics = phases.generate(step)[1]
    else:
        samples, metrics = phases.train_samples(step)
        if job.engines is not None:
            phases.release()
        phases.finish_save(wait=False)
        metrics |= phases.train(step, samples)[1]
        if _saves(job, done):
            phases.save(done)
        if job.engines is not None:
            phases.sync(done)
    if _evaluates(job, done):
        phases.evaluate(done)
    seconds = phases.timers.finish_step()
    phases.log.log("step", step, seconds)
    phases.console.step(step, metrics | seconds)


def _saves(job: Job, done: int) -> bool:
    checkpoint = job.config.checkpoint
    if not checkpoint.save:
        return False
    return done == job.config.data.num_rollout or bool(checkpoint.save_interval and done % checkpoint.save_interval == 0)


def _evaluates(job: Job, done: int) -> bool:
    interval = job.config.eval.eval_interval
    return bool(interval and job.manager is not None and (done % interval == 0 or done == job.config.data.num_rollout))
