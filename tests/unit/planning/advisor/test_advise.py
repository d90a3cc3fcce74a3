"""Layouts that fit: the usual exercises for a 70B model, and small, medium and large models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.errors import UserError
from slime_like.planning.advisor.advise import main, read_model
from slime_like.planning.advisor.layouts import Request, engine_size, propose
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.by_phase import memory_plan
from slime_like.planning.placement import make_plan
from tests.helpers.plan_models import LLAMA_70B

LLAMA_70B_FILE = """MODEL_ARGS=(
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
  --num-query-groups 8
  --vocab-size 128256 --normalization RMSNorm --swiglu --disable-bias-linear --rotary-base 500000
  --untie-embeddings-and-output-weights
)
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "llama-70B.sh"
    path.write_text(LLAMA_70B_FILE)
    return str(path)


def best(gpus, mode, **more):
    proposals = [p for p in propose(Request(model=LLAMA_70B, gpus=gpus, **more)) if p.plan.mode == mode]
    return proposals[0] if proposals else None


@pytest.mark.parametrize("gpus", [8, 32, 64])
@pytest.mark.slow
def test_every_proposal_passes_the_plan_and_leaves_room(gpus):
    proposals = propose(Request(model=LLAMA_70B, gpus=gpus))
    assert proposals
    for proposal in proposals:
        assert proposal.config.problems() == []
        plan = make_plan(proposal.config)
        assert plan.problems == () and plan.num_gpus == gpus
        assert memory_plan(proposal.config, plan).fits


def test_exercise_1_colocated_on_8_gpus():
    # 70.55e9 parameters x 18 bytes / 8 = 147.8 GiB: too much; x 6 (optimizer on the host) = 49.3 GiB, and 16.4 GiB of
    # engine weights.
    proposal = best(8, "colocate")
    assert proposal.config.optimizer.optimizer_cpu_offload
    phases = {phase.name: phase.bytes for phase in proposal.memory.per_gpu[0].phases}
    train, generate = phases["train"], phases["generate"]
    assert (train["weights"] + train["gradients"]) / GIB == pytest.approx(49.3, abs=0.1)
    # the trainer is away: two processes 2, 79 free at the start, of which SGLang keeps 10
    assert generate["engine weights"] / GIB == pytest.approx(16.4, abs=0.1)
    assert generate["kv_cache"] / GIB == pytest.approx(0.873 * 79 - 16.4, abs=0.1)
    # the optimizer always, the weights while engines generate
    assert proposal.memory.per_gpu[0].host_bytes / GIB == pytest.approx((12 + 2) * 70.55e9 / 8 / GIB, rel=0.01)
    assert best(8, "disaggregated") is None


def test_exercise_1_disaggregated_on_32_gpus():
    proposal = best(32, "disaggregated")
    caches = [phase.bytes.get("kv_cache", 0) / GIB for gpu in proposal.memory.per_gpu for phase in gpu.phases]
    assert max(caches) > 45
    assert proposal.plan.roles["actor"].num_gpus == 16 and len(proposal.plan.engines[0].bundles) == 8


@pytest.mark.slow
def test_exercise_3_on_8_nodes_of_8():
    proposal = propose(Request(model=LLAMA_70B, gpus=64))[0]
    actor = proposal.plan.roles["actor"]
    assert proposal.plan.mode == "colocate" and (actor.tp, actor.pp, actor.dp) == (8, 1, 8)
    assert proposal.plan.transport == "disk" and len(proposal.plan.engines) == 8
    assert not proposal.config.optimizer.optimizer_cpu_offload
    assert proposal.config.not_yet() == []  # a real run can do it


def test_colocated_on_several_machines_syncs_over_disk():
    proposal = best(32, "colocate")
    assert proposal.plan.transport == "disk" and "--update-weight-transport" in proposal.flags()


def test_engines_grow_with_the_model():
    assert engine_size(Request(model=LLAMA_70B, gpus=64), 64) == 8
    assert engine_size(Request(model=LLAMA_70B, gpus=1), 1) is None


def test_small_models_are_colocated_without_tricks(repo_root: Path):
    proposal = propose(Request(model=read_model(str(repo_root / "scripts/models/qwen2.5-1.5B.sh")), gpus=8))[0]
    assert proposal.plan.mode == "colocate"
    assert not proposal.config.optimizer.optimizer_cpu_offload and proposal.plan.roles["actor"].pp == 1


def test_the_printed_flags_make_the_same_plan(repo_root: Path, model_file):
    proposal = propose(Request(model=read_model(model_file), gpus=64))[0]
    script = f'source {model_file}; exec {sys.executable} train.py "${{MODEL_ARGS[@]}}" "$@" --plan json'
    command = ["bash", "-c", script, "bash", *proposal.flags()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=repo_root)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    plan = json.loads(result.stdout)
    assert plan["problems"] == [] and plan["memory"]["fits"]
    assert plan["memory"]["per_gpu"] == proposal.memory.to_dict()["per_gpu"]


@pytest.mark.slow
def test_the_command_line(model_file, capsys):
    assert main(["--model", model_file, "--gpus", "64", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("70.55 billion parameters, 141.1 GB in bf16") and "--tensor-model-parallel-size 8" in out
    assert main(["--model", model_file, "--gpus", "2"]) == 1
    assert "Nothing fits" in capsys.readouterr().out
    assert main(["--model", model_file, "--gpus", "12"]) == 2
    assert "no whole machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("MODEL_ARGS=()", "set no MODEL_ARGS"), ("exit 3", "set no MODEL_ARGS"), ("MODEL_ARGS=(--swiglu)", "num-layers")],
)
def test_files_that_are_no_model(tmp_path, content, message):
    path = tmp_path / "model.sh"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_model(str(path))
    with pytest.raises(UserError, match="no such file"):
        read_model(str(path) + ".missing")
