"""Jobs of the trainer that a rank with a pretended device runs, and, as they are, one without."""

from __future__ import annotations

import tempfile

from tests.helpers.train_world import make_config, make_samples, recipe_of


def numbers_of(folder: str, **groups) -> dict:
    """What make_config() is given so that both devices compute the same: fp32 throughout, and Adam's state beside."""
    groups["parallel"] = {"use_distributed_optimizer": True} | groups.get("parallel", {})
    groups["optimizer"] = {"bf16": False, "accumulate_allreduce_grads_in_fp32": True} | groups.get("optimizer", {})
    groups["checkpoint"] = {"hf_checkpoint": folder} | groups.get("checkpoint", {})
    return groups


def train_steps(place: dict, folder: str, num_rollouts: int, groups: dict) -> dict:
    """A few rollouts through the worker's verbs, as the policy's recipe takes them.

    Gives "metrics" (of each rollout), and of the last rollout the record: "reads", "uploads" (counts by line) and
    "events" (kind, detail); "micro_batches": passes forward of the last rollout, with and without gradients.
    """
    from slime_like.megatron_backend.worker import TrainWorker
    from tests.pretend_gpu.record import RECORD

    config = make_config(folder, num_ranks=place["world_size"], **numbers_of(folder, **groups))
    worker = TrainWorker(config, **place)
    worker.start()
    samples = make_samples(8)
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


def save_folder() -> str:
    """A fresh folder for checkpoints."""
    return tempfile.mkdtemp(prefix="pretend-save-")
