"""Publishing through the worker, over the transport that needs no engine: a folder on disk."""

import dataclasses
import os

import numpy as np
import pytest
import torch

from slime_like.config.system import SyncConfig
from tests.helpers.hf_truth import load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "both": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "data": {},
}


def in_world(place, folder, root, ports):
    """layout -> receipts of two versions, and the files of the first; what a folder that cannot be written says."""
    from safetensors.numpy import load_file

    from slime_like.megatron_backend.worker import TrainWorker

    found: dict = {}
    for (layout, parallel), port in zip(LAYOUTS.items(), ports, strict=True):
        config = make_config(folder, num_ranks=4, parallel=parallel)
        directory = os.path.join(root, layout)
        sync = SyncConfig(update_weight_transport="disk", update_weight_disk_dir=directory, update_weight_buffer_size=10_000)
        worker = TrainWorker(dataclasses.replace(config, sync=sync), **(place | {"master_port": port}))
        worker.start()
        receipts = [worker.publish(1, [])]
        version = os.path.join(directory, "version-00000001")
        found[layout + " files"] = {
            name: tensor for entry in os.listdir(version) if entry.endswith(".safetensors") for name, tensor in load_file(os.path.join(version, entry)).items()
        }
        found[layout + " writers"] = sorted({entry[6:13] for entry in os.listdir(version) if entry.endswith(".safetensors")})
        torch.distributed.barrier()  # the next version removes what is being read
        with torch.no_grad():
            for parameter in worker.stage.parameters():
                parameter += 1.0
        receipts.append(worker.publish(2, []))
        found[layout] = receipts
        if layout == "pipeline":
            torch.distributed.barrier()
            if place["rank"] == 0:
                os.rename(directory, directory + ".away")
                with open(directory, "w", encoding="utf-8") as file:
                    file.write("in the way")
            torch.distributed.barrier()
            try:
                worker.publish(3, [])
            except Exception as error:  # noqa: BLE001 - both kinds are looked at below
                found["error"] = f"{type(error).__name__}: {error}"
        worker.close()
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("publish"))
    folder = make_tiny_model(os.path.join(root, "model"), "qwen3", tied=True)
    return {"folder": folder, "ranks": run_ranks(in_world, 4, folder, root, free_ports(len(LAYOUTS)), timeout_s=90)}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_tensors_arrive_bit_for_bit(world, layout):
    expected = dict(load_model(world["folder"]).named_parameters())
    for found in world["ranks"]:
        files, receipt = found[layout + " files"], found[layout][0]
        assert set(files) == set(expected)
        assert all(np.array_equal(files[name], tensor.detach().numpy()) for name, tensor in expected.items())
        assert (receipt.version, receipt.transport, receipt.num_tensors) == (1, "disk", len(expected))
        assert receipt.num_bytes == sum(t.nbytes for t in expected.values())
        assert 0 < receipt.bound_share < 1


def test_digest_tells_weights_and_not_layouts(world):
    digests = [{found[layout][version].digest for layout in LAYOUTS for found in world["ranks"]} for version in (0, 1)]
    assert [len(d) for d in digests] == [1, 1]
    assert digests[0] != digests[1]


def test_every_rank_that_gathers_writes_a_share(world):
    writers = {layout: world["ranks"][0][layout + " writers"] for layout in LAYOUTS}
    assert writers == {
        "tensor": ["000-000", "000-001"],
        "pipeline": ["000-000", "001-000"],
        "both": ["000-000", "000-001", "001-000", "001-001"],
        "data": ["000-000"],
    }


def test_failure_reaches_every_rank(world):
    """The folder is a file: each of the two stages that write fails itself, the others hear of it."""
    errors = [found["error"] for found in world["ranks"]]
    assert all(error.startswith("WeightSyncError: ") and "pipeline" in error for error in errors)
    assert [("cannot be made" in error, "trainer rank" in error) for error in errors] == [(True, False), (True, True)] * 2
