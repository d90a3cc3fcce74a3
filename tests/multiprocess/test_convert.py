"""Conversion between HF folders and Megatron checkpoints: every bit comes back, whichever processes held what on the
way.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_quantised_checkpoint import FORMATS, make_quantised
from slime_like.weight_sync.quantise import undo
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = pytest.mark.multiprocess

#: name -> (family, tied, bf16, sizes on the way to Megatron, sizes on the way back)
CASES = {
    "tied, one process, then tp2": ("qwen3", True, False, {}, {"tensor_model_parallel_size": 2}),
    "untied bf16, pp2, then one process": ("qwen2", False, True, {"pipeline_model_parallel_size": 2}, {}),
    "experts, ep2, then pp2": (
        "qwen3_moe",
        False,
        False,
        {"expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
    ),
    "fp8 blocks, tp2, then one process": ("qwen3", True, False, {"tensor_model_parallel_size": 2}, {}),
    "int8 rows of experts, ep2, then one process": ("qwen3_moe", False, False, {"expert_model_parallel_size": 2}, {}),
}
#: Of those whose source is in eight bits: its format. What comes back is plain.
STORED = {"fp8 blocks, tp2, then one process": "fp8", "int8 rows of experts, ep2, then one process": "int8"}


def make_source(folder, family, *, tied, bf16):
    make_tiny_model(folder, family, tied=tied, num_layers=2)
    if bf16:
        path = os.path.join(folder, "model.safetensors")
        save_file(
            {name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"}
        )
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write('{"a": "tokenizer"}')
    return folder


def run(place, root, ports, **options):
    """One conversion by as many processes as its layout needs; the message of what refused it, else None."""
    from slime_like.config.parallel import ParallelConfig
    from slime_like.errors import UserError
    from slime_like.megatron_backend.convert import Conversion, Place, convert

    job = Conversion(
        **options | {"parallel": ParallelConfig(**options.get("parallel", {}), distributed_timeout_minutes=1)}
    )
    port, done = ports.pop(0), os.path.join(root, f"done-{len(ports)}")
    if place["rank"] >= job.num_ranks:
        deadline = time.monotonic() + 60
        while not os.path.exists(done):  # the next conversion reads what this one writes
            assert time.monotonic() < deadline, f"rank 0 has not finished {options} after 60 s"
            time.sleep(0.05)
        return None
    try:
        convert(job, Place(**place | {"world_size": job.num_ranks, "master_port": port}))
    except UserError as error:
        return str(error)
    finally:
        if place["rank"] == 0:
            open(done, "w").close()
    return None


def train_from(place, port, folder, load):
    """The start of a run from converted weights, and its log-probs before and after a step."""
    from slime_like.megatron_backend.worker import TrainWorker

    worker = TrainWorker(make_config(folder, num_ranks=2, checkpoint={"load": load}), **(place | {"master_port": port}))
    begun, samples = worker.start(), make_samples()
    before = recipe_of(worker).log_probs(samples)
    report = recipe_of(worker).train(0, samples)
    worker.close()
    return {"begun": begun, "log_probs": before, "metrics": report.metrics}


def in_world(place, root, ports):
    ports, results = list(ports), {}
    for number, (name, (_, _, _, there, back)) in enumerate(CASES.items()):
        source, middle, end = (os.path.join(root, f"{kind}-{number}") for kind in ("source", "middle", "end"))
        results[name] = (
            run(place, root, ports, input=source, output=middle, parallel=there),
            run(place, root, ports, input=middle, output=end, origin_hf_dir=source, parallel=back),
        )
    source, middle = os.path.join(root, "source-0"), os.path.join(root, "middle-0")
    results["from Megatron"] = train_from(place, ports.pop(0), source, middle)
    results["from HF"] = train_from(place, ports.pop(0), source, source)
    # One process alone; each is refused before anything is written.
    new, other = os.path.join(root, "new"), os.path.join(root, "source-2")
    results["existing"] = run(place, root, ports, input=source, output=middle)
    results["no HF folder"] = run(place, root, ports, input=middle, output=new)
    results["no Megatron folder"] = run(place, root, ports, input=source, output=new, origin_hf_dir=source)
    results["other architecture"] = run(place, root, ports, input=middle, output=new, origin_hf_dir=other)
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("convert"))
    for number, (name, (family, tied, bf16, _, _)) in enumerate(CASES.items()):
        source = os.path.join(root, f"source-{number}")
        if name in STORED:
            plain = make_source(os.path.join(root, f"plain-{number}"), family, tied=tied, bf16=bf16)
            assert make_quantised(Path(plain), Path(source), STORED[name])
        else:
            make_source(source, family, tied=tied, bf16=bf16)
    return run_ranks(in_world, 2, root, free_ports(18), timeout_s=150)[0] | {"root": root}


def tensors_of(folder):
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(folder, name))
    return tensors


@pytest.mark.parametrize(("number", "name"), enumerate(CASES))
def test_a_round_trip_changes_no_bit(world, number, name):
    assert world[name] == (None, None)
    folders = [os.path.join(world["root"], f"{kind}-{number}") for kind in ("source", "end")]
    source, end = (tensors_of(folder) for folder in folders)
    if name in STORED:
        assert any(tensor.element_size() == 1 for tensor in source.values())
        source = undo(source, FORMATS[STORED[name]][0])
    assert set(source) == set(end) and source
    assert {tensor.dtype for tensor in end.values()} == {torch.bfloat16 if CASES[name][2] else torch.float32}
    assert [key for key in source if not torch.equal(source[key], end[key])] == []
    assert os.path.isfile(os.path.join(folders[1], "tokenizer.json"))
    with open(os.path.join(folders[1], "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == ("bfloat16" if CASES[name][2] else "float32")


def test_training_starts_from_converted_weights_as_from_the_folder(world):
    ours, theirs = world["from Megatron"], world["from HF"]
    assert (ours["begun"]["num_rollouts_done"], ours["begun"]["client_state"]) == (0, {})
    assert [row.tolist() for row in ours["log_probs"]] == [row.tolist() for row in theirs["log_probs"]]
    assert ours["metrics"] == theirs["metrics"]


def test_what_cannot_be_converted_is_refused(world):
    assert "nothing is overwritten" in world["existing"]
    assert "has no config.json" in world["no HF folder"]
    assert "holds no Megatron checkpoint" in world["no Megatron folder"]
    assert "num_experts: checkpoint None, flags 4" in world["other architecture"]
    assert not os.path.exists(os.path.join(world["root"], "new"))


def test_command_line_starts_the_processes_that_the_layout_needs(world, tmp_path):
    source, middle = (os.path.join(world["root"], name) for name in ("source-0", "middle-0"))
    command = [
        sys.executable,
        "-m",
        "slime_like.megatron_backend.convert",
        "mcore-to-hf",
        "--input",
        middle,
        "--origin-hf-dir",
        source,
    ]
    command += ["--output", str(tmp_path / "out"), "--tensor-model-parallel-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'out'}\n"), done.stderr
    source_tensors, converted = tensors_of(source), tensors_of(str(tmp_path / "out"))
    assert all(torch.equal(source_tensors[name], converted[name]) for name in source_tensors)


def test_command_line_says_what_to_change(world, capsys):
    from slime_like.megatron_backend.convert import main

    source = os.path.join(world["root"], "source-0")
    assert main(["hf-to-mcore", "--input", source, "--output", os.path.join(world["root"], "middle-0")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert (
        main(
            [
                "hf-to-mcore",
                "--input",
                source,
                "--output",
                os.path.join(world["root"], "new"),
                "--pipeline-model-parallel-size",
                "3",
            ]
        )
        == 2
    )
    assert "pipeline" in capsys.readouterr().err
