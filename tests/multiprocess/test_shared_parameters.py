"""Parameters that lie in a file which engines map: a run trains as one whose parameters are its own, to the last bit,
and the file has what it exports (slime_like.megatron_backend.shared_parameters).
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from slime_like.records import BASE
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

RANKS = 2
#: Layout -> (family, groups).
LAYOUTS = {
    "dp2": ("qwen3", {}),
    "dp2, bf16, overlapping": (
        "qwen3",
        {"optimizer": {"bf16": True}, "parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "dp2, every rank all of Adam": ("qwen3", {"parallel": {"use_distributed_optimizer": False}}),
    "ep2": ("qwen3_moe", {"parallel": {"expert_model_parallel_size": 2}}),
}


def run(place, port, folder, groups, transport):
    """Two steps; what they said, and what lies in shared memory then."""
    from slime_like.megatron_backend.worker import TrainWorker

    config = make_config(folder, num_ranks=RANKS, num_steps=2, **groups)
    config = dataclasses.replace(
        config,
        placement=dataclasses.replace(config.placement, colocate=True),
        sync=dataclasses.replace(config.sync, update_weight_transport=transport),
    )
    worker = TrainWorker(config, **(place | {"master_port": port}))
    worker.start()
    recipe, samples = recipe_of(worker), make_samples(8)
    seen: dict = {"reports": [recipe.train(step, samples).metrics for step in range(2)]}
    seen["weights"] = {name: tensor.float().clone().numpy() for name, tensor in worker.export(BASE)}
    shared = worker.shared_weights
    if shared is not None:
        with open(shared.path, "rb") as file:
            held = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        seen["all inside"] = all(shared.start_of(parameter.data) is not None for parameter in worker.stage.parameters())
        seen["mapped"] = {}
        for name, tensor in worker.export(BASE):
            if (start := shared.start_of(tensor)) is not None:
                there = held[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
                seen["mapped"][name] = torch.equal(there, tensor.reshape(-1))
    worker.close()
    seen["left"] = shared is not None and os.path.exists(shared.path)
    return seen


def in_world(place, folders, ports):
    """(layout, transport) -> what the rank saw."""
    ports = iter(ports)
    return {
        (layout, transport): run(place, next(ports), folders[family], groups, transport)
        for layout, (family, groups) in LAYOUTS.items()
        for transport in ("broadcast", "ipc")
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {family: make_tiny_model(str(root / family), family) for family in ("qwen3", "qwen3_moe")}
    return run_ranks(in_world, RANKS, folders, free_ports(2 * len(LAYOUTS)), timeout_s=200)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_to_the_last_bit(ranks, layout):
    for rank in ranks:
        own, shared = rank[layout, "broadcast"], rank[layout, "ipc"]
        assert shared["reports"] == own["reports"] and shared["reports"][0] != shared["reports"][1]
        assert all((shared["weights"][name] == weights).all() for name, weights in own["weights"].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_exported_lies_in_the_file(ranks, layout):
    for rank in ranks:
        assert "mapped" not in rank[layout, "broadcast"], "engines that map nothing"
        seen = rank[layout, "ipc"]
        assert seen["all inside"] and not seen["left"]
        assert all(seen["mapped"].values())
        # Megatron's layout has query, key and value in turns; experts of another rank come from there.
        copied = {name.split(".", 3)[-1] for name in set(seen["weights"]) - set(seen["mapped"])}
        kinds = {"experts" if ".experts." in name else name.removesuffix(".weight") for name in copied}
        assert kinds <= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "experts"}, kinds
