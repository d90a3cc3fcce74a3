"""What happens after which rollout: when a run saves, and when it evaluates."""

from __future__ import annotations

from slime_like.job.running import Job


def saves_after(job: Job, num_done: int) -> bool:
    """Whether a checkpoint is written after `num_done` rollouts: every --save-interval, and at the end."""
    checkpoint = job.config.checkpoint
    if not checkpoint.save:
        return False
    return num_done == job.num_rollout or bool(checkpoint.save_interval and num_done % checkpoint.save_interval == 0)


def syncs_after(job: Job, num_done: int) -> bool:
    """Whether engines get the weights after `num_done` rollouts: every --update-weights-interval, and at the end."""
    if job.engines is None:
        return False
    return num_done == job.num_rollout or num_done % job.config.asynchrony.update_weights_interval == 0


def evaluates_after(job: Job, num_done: int) -> bool:
    """Whether evaluation runs after `num_done` rollouts: every --eval-interval, and at the end."""
    interval = job.config.eval.eval_interval
    if not interval or job.rollouts is None:
        return False
    return num_done % interval == 0 or num_done == job.num_rollout


def evaluates_before(job: Job, first: int) -> bool:
    """Whether evaluation runs before the first rollout of this process, `first`."""
    return evaluates_after(job, first) and not (first == 0 and job.config.eval.skip_eval_before_train)
