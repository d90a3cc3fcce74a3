"""Trainer and engines on one card: who has its memory when, from the loop's phases down to the trainer's cached memory.

Covers slime_like.job.phases with slime_like.megatron_backend.card_memory on a device.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.placement import PlacementConfig
from slime_like.records import SyncReceipt
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import disk_order, make_config, make_samples, recipe_of


class NotedCalls(list):
    """The calls of the loop's parts, as events among the device's own."""

    def append(self, call: str) -> None:
        from tests.pretend_gpu.record import RECORD

        name = " ".join(word.strip("(),'") for word in call.split()).strip()
        RECORD.note(name, live_bytes=live_bytes())


def live_bytes() -> int:
    """Of the trainer's tensors on its device."""
    import torch

    return torch.cuda.memory_allocated()


def one_step(place: dict, model: str, folder: str) -> list[tuple[str, int]]:
    """What the loop asks of engines and trainer for one rollout, and what is done to the device: (kind, bytes of the
    trainer's tensors on it).
    """
    from slime_like.megatron_backend.worker import TrainWorker
    from tests.pretend_gpu.record import RECORD
    from tests.unit.job.test_phases import Run

    config = make_config(model, parallel={"use_distributed_optimizer": True}, optimizer={"bf16": True})
    placement = PlacementConfig(actor_num_gpus_per_node=1, colocate=True)
    config = dataclasses.replace(config, placement=placement)
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, verify_weight_sync_interval=0))
    worker = TrainWorker(config, **place)
    worker.start()

    def sync(weights, trainer, in_use) -> SyncReceipt:
        return worker.publish(disk_order(f"{folder}/weights", weights.version))

    run = Run(
        folder,
        config,
        num_rollout=1,
        trainer={
            "release_memory": lambda keep=(): worker.release_memory(keep),
            "train": lambda step, samples: recipe_of(worker).train(step, make_samples(8)),
        },
        engines={"sync": sync},
    )
    for part in (run.job.trainer, run.job.engines, run.job.rollouts):
        part.calls = NotedCalls()
    RECORD.clear()
    run.go()
    worker.close()
    return [(e.kind, e.detail["live_bytes"]) for e in RECORD.events if "live_bytes" in e.detail]


def test_the_card_changes_hands_in_order(pretend, tmp_path):
    (events,) = pretend(one_step, 1, make_tiny_model(str(tmp_path / "model"), "qwen3", num_layers=2), str(tmp_path))
    kinds = [kind for kind, _ in events]
    making_room = ["trainer.release_memory weights", "empty_cache", "engines.resume_memory weights"]
    sync = [
        *making_room,
        "engines.sync base@{}",
        "trainer.release_memory",
        "empty_cache",
        "engines.resume_memory kv_cache",
    ]
    step = ["rollouts.generate 0", "engines.release_memory", "trainer.train 0"]
    wanted = [kind.format(1) for kind in sync] + step + [kind.format(2) for kind in sync]
    assert [kind for kind in kinds if kind in set(wanted)] == wanted
    held = dict(events)  # the last of each kind
    # bf16 weights beside the engines' weights; of all that was there while training, nothing beside their KV cache.
    most = max(num_bytes for _, num_bytes in events)
    assert 0 < held["engines.resume_memory weights"] < most / 4
    assert held["engines.resume_memory kv_cache"] < most / 50
