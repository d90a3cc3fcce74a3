"""What a trainer's rank leaves on its card before engines take theirs: the CUDA branch, on the pretended device."""

from __future__ import annotations

import dataclasses

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples, recipe_of
from tests.pretend_gpu.training import numbers_of


def between_steps(place: dict, folder: str, offload_train: bool | None) -> dict:
    """Two rollouts, with a weight sync between them as a colocated run does it. Gives what the engines found on the
    card: bytes that are alive when they resume "weights" and "kv_cache".
    """
    import torch

    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.records import BASE
    from tests.pretend_gpu.record import RECORD

    groups = numbers_of(folder, loss={"use_kl_loss": True, "kl_loss_coef": 0.1})
    groups["checkpoint"] |= {"ref_load": folder}
    config = make_config(folder, num_ranks=place["world_size"], **groups)
    placement = dataclasses.replace(config.placement, colocate=True, offload_train=offload_train)
    worker = TrainWorker(dataclasses.replace(config, placement=placement), **place)
    report = worker.start()
    recipe, samples = recipe_of(worker), make_samples(8)
    answer: dict = {
        "card_bytes": report["card_bytes"],
        "chunk_tokens": worker.runner._scoring.chunk_tokens,
        "metrics": [recipe.train(0, samples).metrics],
    }
    answer["held"] = worker._card.held_bytes()
    answer["training"] = torch.cuda.memory_allocated()
    RECORD.clear()
    for tag, keep in (("weights", ("weights",)), ("kv_cache", ())):
        worker.release_memory(keep)
        RECORD.note("resume", tag=tag, live_bytes=torch.cuda.memory_allocated())
        if keep:
            answer["sent"] = sum(tensor.numel() for _, tensor in worker.export(BASE))
    answer["events"] = [(event.kind, event.detail) for event in RECORD.of("empty_cache", "resume")]
    answer["metrics"].append(recipe.train(1, samples).metrics)
    worker.close()
    return answer


def test_every_rank_gives_its_card_to_the_engines_before_they_take_it(pretend, tmp_path):
    folder = make_tiny_model(str(tmp_path / "model"), "qwen3")
    away = pretend(between_steps, 2, folder, None)
    stays = pretend(between_steps, 2, folder, False)
    for left, kept in zip(away, stays, strict=True):
        assert [kind for kind, _ in left["events"]] == [kind for kind, _ in kept["events"]]
        assert [kind for kind, _ in left["events"]] == ["empty_cache", "resume", "empty_cache", "resume"]
        at_weights, at_cache = (detail["live_bytes"] for kind, detail in left["events"] if kind == "resume")
        state = sum(left["held"].values())
        rest = left["training"] - state  # rope's angles and the like
        assert min(left["held"].values()) > 0 and 0 <= rest < state / 20
        assert at_weights == left["held"]["weights"] + rest and at_cache == rest
        assert [detail["live_bytes"] for kind, detail in kept["events"] if kind == "resume"] == [kept["training"]] * 2
        assert left["metrics"] == kept["metrics"] and left["sent"] == kept["sent"] > 0


def test_what_a_gpu_does_by_default(pretend, tmp_path):
    """Logits in chunks, and the card's size for the engines' share."""
    (answer,) = pretend(between_steps, 1, make_tiny_model(str(tmp_path / "model"), "qwen3"), None)
    assert answer["chunk_tokens"] == 1024 and answer["card_bytes"] > 2**33
