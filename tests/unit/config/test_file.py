"""Config files say what flags say: the same values, the same checks, and a run's config.json gives the same run."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from arguments import parse_args
from slime_like.config.base import read_value
from slime_like.config.file import config_paths, read_config_files
from slime_like.config.run import GROUPS, RunConfig
from slime_like.errors import ConfigError, UserError
from slime_like.utils.files import RunDirectory

FLAGS = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --kv-channels 32 --vocab-size 320 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu"
    " --disable-bias-linear --qk-layernorm --rotary-base 10000 --rm-type math --num-rollout 3 --rollout-batch-size 2"
    " --n-samples-per-prompt 2 --lr 1e-6 --no-colocate-policy-ref --rollout-stop a b --eval-prompt-data aime aime.jsonl"
    " --eval-interval 2 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --hf-checkpoint /nowhere/model --prompt-data"
    " data.jsonl --sglang-mem-fraction-static 0.4 --sglang-enable-metrics --sglang-router-policy round_robin"
    " --log-level debug"
)
TABLES = """
[model]
num-layers = 4
hidden-size = 128
ffn_hidden_size = 384
num-attention-heads = 4
group-query-attention = true
num-query-groups = 2
kv-channels = 32
vocab-size = 320
normalization = "RMSNorm"
norm-epsilon = 1e-6
swiglu = true
disable-bias-linear = true
qk-layernorm = true
rotary-base = 10000  # a whole number for a flag that takes any
[data]
prompt-data = "data.jsonl"
num-rollout = 3
[reward]
rm-type = "math"
[rollout]
rollout-batch-size = 2
n-samples-per-prompt = 2
rollout-stop = ["a", "b"]
[eval]
eval-prompt-data = ["aime", "aime.jsonl"]
eval-interval = 2
[optimizer]
lr = 1e-6
[placement]
colocate-policy-ref = false
actor-num-gpus-per-node = 2
rollout-num-gpus = 2
[checkpoint]
hf-checkpoint = "/nowhere/model"
[engine]
sglang-router-policy = "round_robin"
[sglang]
mem-fraction-static = 0.4
enable-metrics = true
[observability]
log-level = "debug"
"""


def flat(text: str) -> str:
    """Without tables; what was under [sglang] gets the prefix."""
    head, _, sglang = text.partition("[sglang]\n")
    sglang, table, rest = sglang.partition("[observability]")
    lines = [f"sglang-{line}" if line else "" for line in sglang.splitlines()]
    return "\n".join(line for line in [*head.splitlines(), *lines, *rest.splitlines()] if not line.startswith("["))


def written(folder: Path, text: str, name: str = "run.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def command(*parts: str):
    return parse_args([*shlex.split(" ".join(parts)), "--plan"])


def problems(*parts: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        command(*parts)
    return error.value.problems


@pytest.mark.parametrize("text", [TABLES, flat(TABLES)], ids=["tables", "flat"])
def test_a_file_says_what_flags_say(tmp_path, text):
    assert command("--config", written(tmp_path, text)).config == command(FLAGS).config


def test_the_example_of_the_documentation(tmp_path):
    text = (Path(__file__).parents[3] / "docs/config-files.md").read_text()
    settings = read_config_files([written(tmp_path, text.partition("```toml\n")[2].partition("```")[0])])
    assert (
        not settings.problems
        and settings.values["num_rollout"] == 100
        and settings.sglang == {"mem_fraction_static": "0.7"}
    )
    tables = text.partition("- Tables: ")[2].partition(".\n")[0]
    assert re.findall(r"`([a-z]+)`", tables) == [*GROUPS, "sglang"]


def test_later_files_and_then_flags_win(tmp_path):
    first, second = (
        written(tmp_path, TABLES),
        written(tmp_path, "lr = 2e-6\nrollout-stop = ['c']\n[sglang]\nmem-fraction-static = 0.5\n", "second.toml"),
    )
    both = command("--config", first, second).config
    assert both == command("--config", first, "--config", second).config
    assert (both.optimizer.lr, both.rollout.rollout_stop, both.engine.sglang) == (
        2e-6,
        ["c"],
        {"mem_fraction_static": "0.5", "enable_metrics": True},
    )
    assert command("--config", second, first).config.optimizer.lr == 1e-6
    flags = command(
        "--config", first, "--lr 3e-6 --colocate-policy-ref --sglang-mem-fraction-static 0.6 --rollout-stop d"
    ).config
    assert (flags.optimizer.lr, flags.placement.colocate_policy_ref, flags.engine.sglang["mem_fraction_static"]) == (
        3e-6,
        True,
        "0.6",
    )
    assert flags.rollout.rollout_stop == ["d"]


def test_every_problem_of_every_file_and_of_the_flags_at_once(tmp_path):
    text = """
num-rolout = 3
config = "other.toml"
num_epoch = 1
[rollout]
lr = 1e-6
[loss]
num-epoch = 2
advantage-estimator = "grop"
no-use-kl-loss = true
eps-clip = true
[optimzer]
lr = 1
[batch]
global-batch-size = "many"
micro-batch-size = [1, 2]
[checkpoint]
multimodal-keys = "image"
[sync]
update-weight-transport = "nccl"
[placement]
colocate = "yes"
[sglang]
max-running-requests = [true]
"""
    path = written(tmp_path, text)
    expected = [
        f"{path}: num-rolout: unknown key. Did you mean num-rollout in [data]?",
        f"{path}: config: is for the command line only.",
        f"{path}: [rollout] lr: belongs into [optimizer].",
        f"{path}: [loss] num-epoch: is given twice, as num_epoch before.",
        f"{path}: [loss] advantage-estimator: --advantage-estimator 'grop' is unknown. Known:",
        f"{path}: [loss] no-use-kl-loss: is written use-kl-loss = false.",
        f"{path}: [loss] eps-clip: --eps-clip takes a text or a number, not True.",
        f"{path}: [optimzer]: unknown table. Did you mean [optimizer]?",
        f"{path}: [batch] global-batch-size: --global-batch-size 'many' is no int.",
        f"{path}: [batch] micro-batch-size: --micro-batch-size takes one value, not [1, 2].",
        f"{path}: [checkpoint] multimodal-keys: --multimodal-keys is refused: prompts are text only",
        (
            f"{path}: [sync] update-weight-transport: --update-weight-transport nccl is refused: this transport is"
            " called broadcast"
        ),
        f"{path}: [placement] colocate: --colocate is a switch: true or false, not 'yes'.",
        (
            f"{path}: [sglang] max-running-requests: --sglang-max-running-requests takes a text, a number, true or"
            " false, or a list"
        ),
        "--config nowhere.toml: no such file or directory.",
        "unknown flag --nmu-rollout. Did you mean --num-rollout?",
        "--lr 'x' is no float.",
    ]
    listed = problems("--config", path, "nowhere.toml --nmu-rollout 3 --lr x")
    for start in expected:
        assert any(problem.startswith(start) for problem in listed), start
    assert len(listed) == len(expected), "\n".join(listed)


def test_what_goes_wrong_between_groups_names_file_and_key(tmp_path):
    path = written(tmp_path, TABLES + "[batch]\nglobal-batch-size = 3\n")
    listed = problems("--config", path, "--sglang-attention-backnd triton --rollout-batch-size 4")
    assert any(
        "--global-batch-size" in p
        and f"{path}: [batch] global-batch-size" in p
        and "[rollout] n-samples-per-prompt" in p
        for p in listed
    )
    assert not any("rollout-batch-size" in p.partition(" (from ")[2] for p in listed), "the command line has that flag"
    assert any(p.startswith("--sglang-attention-backnd") and "(from" not in p for p in listed)
    path = written(tmp_path, TABLES.replace("mem-fraction-static", "mem-fraction-statick"))
    (problem,) = problems("--config", path)
    assert (
        problem.endswith(f"(from {path}: [sglang] mem-fraction-statick)")
        and "Did you mean --sglang-mem-fraction-static?" in problem
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "lr = ", "Invalid value (at end of document)."),
        ("run.toml", "lr = 1\nlr = 2\n", "Cannot overwrite a value"),
        ("run.json", "{", "Expecting property name"),
        ("run.json", "[1]", "holds no table."),
        ("run.yaml", "lr: 1", "is neither a .toml file nor a .json file."),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    path = written(tmp_path, text, name)
    (problem,) = problems(FLAGS, "--config", path)
    assert problem.startswith(f"--config {path}: ") and message in problem


def test_the_flag_takes_several_and_needs_one(tmp_path):
    assert config_paths(["--config", "a", "b", "--lr", "1", "--config=c", "-h"]) == ["a", "b", "c"]
    assert problems(FLAGS, "--config") == ["argument --config: expected at least one argument"]


def test_null_is_for_fields_that_may_be_none(tmp_path):
    path = written(tmp_path, json.dumps({"save": None, "optimizer": {"lr": None}}), "run.json")
    assert problems("--config", path) == [f"{path}: [optimizer] lr: --lr needs a value."]


def test_every_default_of_every_flag_is_read_as_itself():
    import typing

    for kind in GROUPS.values():
        hints, group = typing.get_type_hints(kind), kind()
        for field in dataclasses.fields(kind):
            if "help" in field.metadata:
                wrong: list[str] = []
                default = getattr(group, field.name)
                assert (
                    read_value(field, hints[field.name], json.loads(json.dumps(default)), wrong) == default
                    and not wrong
                ), field.name


def resolved(config: RunConfig, run_dir: Path) -> RunConfig:
    """As cluster.build.resolve leaves it in config.json, with a weight transport over disk."""
    sync = dataclasses.replace(
        config.sync, update_weight_transport="disk", update_weight_disk_dir=str(run_dir / "weights")
    )
    return dataclasses.replace(
        config, sync=sync, observability=dataclasses.replace(config.observability, run_dir=str(run_dir))
    )


def test_a_runs_config_gives_the_same_run_in_a_directory_of_its_own(tmp_path):
    old = resolved(command(FLAGS, "--save saved --save-interval 2").config, tmp_path / "old")
    run = RunDirectory.create(old)
    again = command("--config", str(run.config))
    new = again.config
    assert new.observability.run_dir is None and new.sync.update_weight_disk_dir is None
    assert resolved(new, tmp_path / "old") == old
    assert f"{run.config} is of the run in {tmp_path}/old: this run gets a directory of its own" in again.notes
    assert f"--save saved is that of {run.config}: what the run before wrote there may be replaced" in again.notes
    elsewhere = command("--config", str(run.config), "--save other --run-dir", str(tmp_path / "new"))
    assert elsewhere.config.observability.run_dir == str(tmp_path / "new") and not any(
        "old" in note or "saved" in note for note in elsewhere.notes
    )
    with pytest.raises(UserError, match="holds another run"):
        RunDirectory.create(command("--config", str(run.config), "--run-dir", str(tmp_path / "old")).config)


def test_a_delta_runs_config_is_taken(tmp_path):
    config = command(FLAGS, "--update-weight-mode delta").config
    recorded = dataclasses.replace(config, sync=dataclasses.replace(config.sync, update_weight_transport="delta"))
    assert command("--config", written(tmp_path, recorded.to_json(), "config.json")).config == config


def test_a_file_that_is_laid_over_a_runs_config(tmp_path):
    old = resolved(command(FLAGS, "--save saved --save-interval 2").config, tmp_path / "old")
    path = written(tmp_path, old.to_json(), "config.json")
    over = written(tmp_path, 'save = "elsewhere"\nrun-dir = "here"\n')
    both = command("--config", path, over)
    assert (both.config.checkpoint.save, both.config.observability.run_dir) == ("elsewhere", "here")
    assert not any("saved" in note or "directory" in note for note in both.notes)
