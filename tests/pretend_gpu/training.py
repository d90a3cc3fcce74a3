"""Jobs of the trainer that a rank with a pretended device runs, and, as they are, one without."""

from __future__ import annotations

from slime_like.records import BASE
from tests.helpers.parity import sharing_batch
from tests.helpers.train_world import make_config, make_samples, recipe_of


def shared_steps(place: dict, folder: str, num_rollouts: int, share_prompt: str) -> dict:
    """train_steps() of samples that share their prompts, which is asked for or not."""
    batch = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "share_prompt": share_prompt}
    return train_steps(place, folder, num_rollouts, {"batch": batch}, alike=True)


def numbers_of(folder: str, **groups) -> dict:
    """What make_config() is given so that both devices compute the same: fp32 throughout, and an epsilon with which
    Adam does not make large steps of what rounding left of a gradient that is 0.
    """
    groups["parallel"] = {"use_distributed_optimizer": True} | groups.get("parallel", {})
    groups["optimizer"] = {"bf16": False, "accumulate_allreduce_grads_in_fp32": True, "adam_eps": 1e-3} | groups.get(
        "optimizer", {}
    )
    groups["checkpoint"] = {"hf_checkpoint": folder} | groups.get("checkpoint", {})
    return groups


def train_steps(place: dict, folder: str, num_rollouts: int, groups: dict, *, alike: bool = False) -> dict:
    """A few rollouts through the worker's verbs, as the policy's recipe takes them. alike: of samples that share their
    prompts.

    Gives "metrics" (of each rollout), and of the last rollout the record: "reads", "uploads" (counts by line) and
    "events" (kind, detail); "micro_batches": passes forward of the last rollout, with and without gradients.
    """
    from slime_like.megatron_backend.worker import TrainWorker
    from tests.pretend_gpu.record import RECORD

    config = make_config(folder, num_ranks=place["world_size"], **numbers_of(folder, **groups))
    worker = TrainWorker(config, **place)
    worker.start()
    samples = sharing_batch() if alike else make_samples(8)
    metrics = []
    for number in range(num_rollouts):
        RECORD.clear()
        metrics.append(recipe_of(worker).train(number, samples).metrics)
    answer = {
        "metrics": metrics,
        "reads": dict(RECORD.reads),
        "uploads": dict(RECORD.uploads),
        "events": [(event.kind, event.detail) for event in RECORD.events],
        "device": str(next(worker.stage.parameters()).device),
    }
    worker.close()
    return answer


def step_reads(place: dict, folder: str, groups: dict, sizes: list[int]) -> list[dict[str, int]]:
    """Host reads by line of forward and backward over all micro-batches of a train step of so many samples, for each
    of `sizes`.
    """
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.worker import TrainWorker
    from tests.pretend_gpu.record import RECORD

    worker = TrainWorker(make_config(folder, num_ranks=place["world_size"], **numbers_of(folder, **groups)), **place)
    worker.start()
    reads = []
    for size in sizes:
        (batch,) = recipe_of(worker).ready([make_samples(size)])
        RECORD.clear()
        worker.forward_backward(batch, LossSpec(), weights=BASE)
        reads.append(dict(RECORD.reads))
    worker.close()
    return reads
