"""Publishing through the worker: what slime_like.megatron_backend.publish gathers, over the transport that needs no
engine, a folder on disk.
"""

import dataclasses
import os

import numpy as np
import pytest
import torch

from slime_like.config.sync import SyncConfig
from slime_like.weight_sync.buckets import Digest
from tests.helpers import weight_transforms as transforms
from tests.helpers.hf_truth import load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import disk_order, free_ports, make_config, run_ranks

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "both": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "data": {},
}
TRANSFORMS = (
    "norms_in_two_parts",
    "raises_at_the_last_norm",
    "one_name_in_two_stages",
    "differs_by_rank",
    "to_nothing",
)


def in_world(place, folder, root, ports):
    """layout -> receipts of two versions, and the files of the first; what a folder that cannot be written says."""
    from safetensors.numpy import load_file

    from slime_like.megatron_backend.worker import TrainWorker

    results: dict = {}
    for (layout, parallel), port in zip(LAYOUTS.items(), ports, strict=False):
        config = make_config(folder, num_ranks=4, parallel=parallel)
        directory = os.path.join(root, layout)
        sync = SyncConfig(
            update_weight_transport="disk", update_weight_disk_dir=directory, update_weight_buffer_size=10_000
        )
        worker = TrainWorker(dataclasses.replace(config, sync=sync), **(place | {"master_port": port}))
        worker.start()
        receipts = [worker.publish(disk_order(directory, 1))]
        version = os.path.join(directory, "version-00000001")
        results[layout + " files"] = {
            name: tensor
            for entry in os.listdir(version)
            if entry.endswith(".safetensors")
            for name, tensor in load_file(os.path.join(version, entry)).items()
        }
        results[layout + " writers"] = sorted(
            {entry[6:13] for entry in os.listdir(version) if entry.endswith(".safetensors")}
        )
        torch.distributed.barrier()  # the next version removes what is being read
        with torch.no_grad():
            for parameter in worker.stage.parameters():
                parameter += 1.0
        receipts.append(worker.publish(disk_order(directory, 2)))
        results[layout] = receipts
        if layout == "pipeline":
            torch.distributed.barrier()
            if place["rank"] == 0:
                os.rename(directory, directory + ".away")
                with open(directory, "w", encoding="utf-8") as file:
                    file.write("in the way")
            torch.distributed.barrier()
            try:
                worker.publish(disk_order(directory, 3))
            except Exception as error:  # noqa: BLE001 - both kinds are looked at below
                results["error"] = f"{type(error).__name__}: {error}"
        worker.close()
    results["transformed"] = with_transforms(
        place | {"master_port": ports[-1]}, folder, os.path.join(root, "transformed")
    )
    return results


def with_transforms(place, folder, root):
    """Two stages that two ranks each write: function -> receipt and files, or what it says is wrong.

    One worker for all.
    """
    from safetensors.torch import load_file

    from slime_like.megatron_backend.worker import TrainWorker

    base = make_config(folder, num_ranks=4, parallel=LAYOUTS["both"])
    worker, results = TrainWorker(base, **place), {}
    worker.start()
    for function in TRANSFORMS:
        directory = os.path.join(root, function)
        sync = SyncConfig(
            update_weight_transport="disk", update_weight_disk_dir=directory, update_weight_buffer_size=10_000
        )
        worker.config = dataclasses.replace(
            base, sync=dataclasses.replace(sync, custom_weight_transform_path=f"{transforms.__name__}.{function}")
        )
        try:
            receipt = worker.publish(disk_order(directory, 1))
            version = os.path.join(directory, "version-00000001")
            files = [
                load_file(os.path.join(version, entry))
                for entry in os.listdir(version)
                if entry.endswith(".safetensors")
            ]
            results[function] = receipt, {name: to_numbers(tensor) for file in files for name, tensor in file.items()}
        except Exception as error:  # noqa: BLE001 - looked at below
            torch.distributed.barrier()  # the first rank removes what was written
            results[function] = f"{type(error).__name__}: {error}", os.listdir(directory)
        torch.distributed.barrier()
        if worker._sender is not None:
            worker._sender.close()
            worker._sender = None
    worker.close()
    return results


def to_numbers(tensor):
    """(type, values): numpy has no bf16."""
    return str(tensor.dtype), tensor.float().numpy()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("publish"))
    folder = make_tiny_model(os.path.join(root, "model"), "qwen3", tied=True)
    return {"folder": folder, "ranks": run_ranks(in_world, 4, folder, root, free_ports(len(LAYOUTS) + 1), timeout_s=90)}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_tensors_arrive_bit_for_bit(world, layout):
    expected = dict(load_model(world["folder"]).named_parameters())
    for rank in world["ranks"]:
        files, receipt = rank[layout + " files"], rank[layout][0]
        assert set(files) == set(expected)
        assert all(np.array_equal(files[name], tensor.detach().numpy()) for name, tensor in expected.items())
        assert (receipt.version, receipt.transport, receipt.num_tensors) == (1, "disk", len(expected))
        assert receipt.num_bytes == sum(t.nbytes for t in expected.values())
        assert 0 < receipt.bound_share < 1


def test_digest_tells_weights_and_not_layouts(world):
    digests = [{rank[layout][version].digest for layout in LAYOUTS for rank in world["ranks"]} for version in (0, 1)]
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
    errors = [rank["error"] for rank in world["ranks"]]
    assert all(error.startswith("WeightSyncError: ") and "pipeline" in error for error in errors)
    assert [("cannot be made" in error, "trainer rank" in error) for error in errors] == [
        (True, False),
        (True, True),
    ] * 2


def test_what_a_transform_makes_is_what_is_sent(world):
    """Norms in two parts, keys left out: files, counts and digest are of what was made, and every rank that gathers
    writes some.
    """
    expected = {}
    for name, tensor in load_model(world["folder"]).named_parameters():
        tensor = tensor.detach()
        if name.endswith("norm.weight"):
            expected |= {name: tensor.bfloat16(), f"{name}_rest": tensor - tensor.bfloat16()}
        elif "k_proj" not in name:
            expected[name] = tensor
    digest = Digest()
    for name, tensor in expected.items():
        digest.add(name, tensor)
    assert any(tensor.abs().sum() > 0 for name, tensor in expected.items() if name.endswith("_rest"))
    for rank in world["ranks"]:
        receipt, files = rank["transformed"]["norms_in_two_parts"]
        assert set(files) == set(expected)
        for name, tensor in expected.items():
            assert files[name][0] == str(tensor.dtype) and np.array_equal(files[name][1], tensor.float().numpy())
        assert (receipt.num_tensors, receipt.num_bytes) == (len(expected), sum(t.nbytes for t in expected.values()))
        assert receipt.digest == f"{digest.value:016x}" != rank["both"][0].digest


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises_at_the_last_norm", "{flag}, model.norm.weight: the function raised ArithmeticError: no such scale"),
        ("one_name_in_two_stages", "{flag}: first_or_last was made twice"),
        ("differs_by_rank", "{flag}: ranks of pipeline stage 0 made other names"),
        ("to_nothing", "{flag}: nothing was left to send"),
    ],
)
def test_a_bad_transform_is_named_on_every_rank_and_leaves_no_version(world, function, message):
    flag = f"--custom-weight-transform-path tests.helpers.weight_transforms.{function}"
    for rank in world["ranks"]:
        error, left = rank["transformed"][function]
        assert error.startswith("WeightSyncError: ") and message.format(flag=flag) in error
        assert left == []
