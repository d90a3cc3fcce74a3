"""The plan as text and as JSON: the documented object, and words that are true for the mode."""

import dataclasses
import json

import pytest

import train
from slime_like.config.model import ModelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.planning.placement import cannot_run_yet, make_plan
from slime_like.planning.report.render import as_json, make_report, render_plan

SIZES = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8, "vocab_size": 32000}
MODEL = ModelConfig(**SIZES, swiglu=True, normalization="RMSNorm", disable_bias_linear=True)
COMMAND = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()] + [
    "--swiglu", "--normalization=RMSNorm", "--disable-bias-linear", "--rm-type=math", "--rollout-batch-size=4",
    "--num-rollout=1",
]  # fmt: skip


def config(*, use_kl_loss=False, **placement):
    base = RunConfig(model=MODEL)
    return dataclasses.replace(
        base, loss=dataclasses.replace(base.loss, use_kl_loss=use_kl_loss), placement=PlacementConfig(**placement)
    )


def test_json_is_the_documented_object():
    report = json.loads(
        as_json(
            make_report(
                config(actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, use_kl_loss=True)
            )
        )
    )
    assert list(report) == [
        "mode",
        "num_gpus",
        "rollout_offset",
        "bundles",
        "roles",
        "engines",
        "memory",
        "weight_sync",
        "async",
        "share_prompt",
        "problems",
    ]
    assert report["bundles"][1] == {"index": 1, "node": 0, "gpu": 1, "roles": {"actor": 1.0, "ref": 0.0}}
    assert report["roles"]["actor"] == {"num_gpus": 2, "bundles": [0, 1], "tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 2}
    engine = {
        "index": 0,
        "bundles": [2, 3],
        "tp": 2,
        "pp": 1,
        "dp": 1,
        "ep": 1,
        "external_url": None,
        "node_ranks": [0, 0],
    }
    assert report["engines"] == [engine]
    assert [gpu["bundle"] for gpu in report["memory"]["per_gpu"]] == [0, 1, 2, 3]
    gpu = report["memory"]["per_gpu"][0]
    assert [phase["name"] for phase in gpu["phases"]] == ["start", "generate", "score", "train", "sync"] and gpu[
        "fits"
    ] is True
    assert (
        gpu["peak_bytes"]
        == max(sum(phase["bytes"].values()) for phase in gpu["phases"])
        <= report["memory"]["limit_bytes"]
    )
    assert set(report["weight_sync"]) >= {"transport", "bytes", "bound_s"} and report["weight_sync"]["bytes"] > 0
    assert report["problems"] == []


def test_weights_that_exceed_the_card_are_a_problem_of_a_plan():
    small = config(actor_num_gpus_per_node=2, rollout_num_gpus=2, gpu_memory_gib=0.5)
    (problem,) = make_report(small).problems
    assert (
        "GiB for weights, gradients and optimizer alone" in problem
        and "has 0.5 (--gpu-memory-gib)" in problem
        and "Fix:" in problem
    )
    assert make_report(small, planning=False).problems, "the card was given"
    unknown = dataclasses.replace(
        small,
        model=dataclasses.replace(MODEL, num_layers=4000),
        placement=dataclasses.replace(small.placement, gpu_memory_gib=None),
    )
    assert make_report(unknown).problems and not make_report(unknown, planning=False).problems


def test_impossible_placements_have_no_memory_plan():
    report = make_report(config(actor_num_gpus_per_node=2))
    assert report.memory is None and report.sync is None and report.to_dict()["memory"] is None
    assert "This plan cannot run:\n[1] --rollout-num-gpus is missing" in report.text()


def test_a_run_without_engines_names_none():
    text = make_report(config(actor_num_gpus_per_node=2, debug_train_only=True)).text()
    assert text.startswith("mode train_only: 2 GPUs\n") and "engine" not in text.split("memory")[0]


def test_many_gpus_share_lines():
    text = render_plan(
        make_plan(config(actor_num_nodes=8, actor_num_gpus_per_node=8, colocate=True, rollout_num_gpus_per_engine=4))
    )
    assert "  node 7 gpus 0-7  bundles 56-63  actor 0.5, rollout 0.5   [engines 14-15]" in text.splitlines()
    assert len([line for line in text.splitlines() if line.startswith("  node")]) == 8


def test_what_a_real_run_cannot_do_yet():
    over = make_plan(config(actor_num_nodes=2, actor_num_gpus_per_node=2, colocate=True))
    assert not over.problems and "--colocate over 2 machines" in cannot_run_yet(over)[0]
    assert cannot_run_yet(dataclasses.replace(over, transport="disk")) == []
    assert cannot_run_yet(make_plan(config(actor_num_gpus_per_node=2, colocate=True))) == []


@pytest.mark.parametrize(
    ("flags", "status", "problem"),
    [
        (["--actor-num-gpus-per-node=2", "--colocate"], 0, None),
        (["--actor-num-gpus-per-node=2"], 2, "--rollout-num-gpus is missing"),
        (["--actor-num-gpus-per-node=2", "--colocate", "--rollout-external"], 2, "exclude each other"),
        (["--no-such-flag"], 2, "unknown flag --no-such-flag"),
    ],
)
@pytest.mark.parametrize("asking", [["--plan", "json"], ["--plan=json"]])
def test_plan_json_prints_one_object_and_nothing_else(flags, status, problem, asking, capsys):
    assert train.main([*COMMAND, *flags, *asking]) == status
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any(problem in text for text in problems) if problem else problems == []
