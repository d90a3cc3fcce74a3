"""Train state that leaves for the host between steps: nothing stays, and the next steps are the same to the last bit.

A run that offloads against the same run that does not, on Megatron's own buffers and optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
import gc

import pytest
import torch

from slime_like.records import BASE, REFERENCE
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

#: Layout -> (ranks, family, groups).
LAYOUTS = {
    "tp2 dp2, distributed optimizer": (4, "qwen3", {"parallel": {"tensor_model_parallel_size": 2}}),
    "tp2 dp2, bf16": (4, "qwen3", {"parallel": {"tensor_model_parallel_size": 2}, "optimizer": {"bf16": True}}),
    "ep2 dp2, experts": (2, "qwen3_moe", {"parallel": {"expert_model_parallel_size": 2}}),
    "pp2, every rank all of Adam": (
        2,
        "qwen3",
        {"parallel": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": False}},
    ),
}
#: A tenth of the smallest rank's weights.
_REST_BYTES = 9_000


def tensor_bytes() -> int:
    """Bytes behind every tensor that this process can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # some objects do things when they are asked for their class
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def run(place, port, folders, layout, *, offloads):
    """Three rollout steps of one rank, with everything that happens between them in a colocated run."""
    from slime_like.megatron_backend.worker import TrainWorker

    ranks, family, groups = LAYOUTS[layout]
    config = make_config(
        folders[family],
        num_ranks=ranks,
        num_steps=2,
        loss={"use_kl_loss": True, "kl_loss_coef": 0.1},
        checkpoint={"ref_load": folders[family + " reference"], "load": folders[family]},
        **groups,
    )
    placement = dataclasses.replace(config.placement, colocate=True, offload_train=offloads)
    worker = TrainWorker(
        dataclasses.replace(config, placement=placement), **(place | {"world_size": ranks, "master_port": port})
    )
    worker.start()
    recipe, samples, seen = recipe_of(worker), make_samples(8), {"reports": []}
    for step in range(3):
        worker.release_memory(("weights",))
        seen["published"] = {name: tensor.float().clone().numpy() for name, tensor in worker.export(BASE)}
        seen["probe"] = recipe.probe(samples)
        held = worker._card.held_bytes()
        before = tensor_bytes()
        worker.release_memory()
        # the copies on the host are what is left, here where the card is the host
        copies = sum(copy.numel() for copy in worker._card._copies.values())
        seen["held"], seen["after"] = held, worker._card.held_bytes()
        seen["shrunk"], seen["copies"] = before - tensor_bytes(), copies
        seen["reports"].append(recipe.train(step, samples).metrics)
    seen["reference"] = recipe.log_probs(samples, weights=REFERENCE)
    seen["full"] = worker._card.held_bytes()
    worker.close()
    return seen


def in_world(place, folders, ports):
    """(layout, offloads) -> what the rank saw, of the layouts of so many ranks."""
    ports = iter(ports)
    return {
        (layout, offloads): run(place, next(ports), folders, layout, offloads=offloads)
        for layout, (ranks, *_) in LAYOUTS.items()
        for offloads in (False, True)
        if ranks == place["world_size"]
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {}
    for family in ("qwen3", "qwen3_moe"):
        folders[family] = make_tiny_model(str(root / family), family)
        folders[family + " reference"] = make_tiny_model(str(root / f"{family}-reference"), family, seed=1)
    return functools.cache(
        lambda ranks: run_ranks(in_world, ranks, folders, free_ports(2 * len(LAYOUTS)), timeout_s=200)
    )


every_layout = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long_run] * (row[0] > 2)) for name, row in LAYOUTS.items()]
)


@every_layout
def test_the_steps_are_the_same_to_the_last_bit(world, layout):
    for seen in world(LAYOUTS[layout][0]):
        stayed, moved = (seen[layout, offloads] for offloads in (False, True))
        assert moved["reports"] == stayed["reports"]
        assert stayed["reports"][0]["train/loss"] != stayed["reports"][2]["train/loss"]
        for name, tensor in stayed["published"].items():
            assert (tensor == moved["published"][name]).all(), name
        for what in ("probe", "reference"):
            assert all((a == b).all() for a, b in zip(stayed[what], moved[what], strict=True)), what


@every_layout
def test_nothing_of_the_train_state_stays(world, layout):
    for seen in world(LAYOUTS[layout][0]):
        moved, stayed = seen[layout, True], seen[layout, False]
        # only the weights are there for a sync
        assert moved["held"] == {"weights": moved["full"]["weights"], "gradients": 0, "optimizer": 0}
        assert moved["after"] == dict.fromkeys(moved["full"], 0)
        # beside what else is dropped meanwhile, as numbers of the pass before
        assert 0 <= moved["shrunk"] - moved["full"]["weights"] < _REST_BYTES
        # gradients are zeros between steps: no copy of them is kept
        assert moved["copies"] == moved["full"]["weights"] + moved["full"]["optimizer"]
        assert moved["full"] == stayed["full"] and min(stayed["full"].values()) > 0
        assert 0 <= stayed["shrunk"] < _REST_BYTES and stayed["copies"] == 0 and stayed["after"] == stayed["full"]
