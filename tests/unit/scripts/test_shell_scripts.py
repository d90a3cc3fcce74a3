"""The shell scripts hold together: strict mode, known flags, nothing killed by name, set-up that says what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN_SCRIPTS = ("run-colocate.sh", "run-disaggregated.sh", "run-external.sh")


def shell_files(root: Path) -> list[Path]:
    return [root / ".ci" / "run", *sorted((root / "scripts").rglob("*.sh"))]


def bash(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", *command], capture_output=True, text=True, timeout=120, check=False, env=env, cwd=cwd)


def test_every_file_parses(repo_root: Path):
    for path in shell_files(repo_root):
        assert bash("-n", str(path)).returncode == 0, path


def test_programs_are_strict_and_kill_nothing_by_name(repo_root: Path):
    for path in shell_files(repo_root):
        text = path.read_text()
        if text.startswith("#!"):
            assert "\nset -euo pipefail\n" in text, path
        assert not re.search(r"\b(pkill|killall|ray stop)\b(?!\")", text), path


@pytest.mark.parametrize("name", [*RUN_SCRIPTS, "quickstart.sh"])
def test_every_flag_is_known(repo_root: Path, name: str):
    known = {option for line in (repo_root / "tests/unit/flags.txt").read_text().splitlines() for option in line.split(" = ")[0].split(", ")}
    text = re.sub(r"<<TEXT\n.*?\nTEXT\n", "", (repo_root / "scripts" / name).read_text(), flags=re.DOTALL)
    arrays = re.findall(r"^[A-Z_]+_ARGS=\(\n(.*?)^\)", text, flags=re.DOTALL | re.MULTILINE)
    flags = {word for body in arrays for word in re.findall(r"(?<!\S)--[a-z0-9-]+", body)}
    assert len(flags) > 20
    assert {flag for flag in flags if not flag.startswith("--sglang-")} - known == set()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("run-colocate.sh", "colocate"),
        ("run-disaggregated.sh", "disaggregated"),
        ("run-external.sh", "external"),
        ("run-delta.sh", "external"),
        ("run-interleaved.sh", "disaggregated"),
        ("run-algorithms.sh", "colocate"),
        ("run-roles.sh", "disaggregated"),
        ("run-debug-rollout-only.sh", "rollout_only"),
        ("run-debug-train-only.sh", "train_only"),
    ],
)
@pytest.mark.slow
def test_run_scripts_submit_a_command_that_plans(repo_root: Path, tmp_path: Path, tiny_model_dir: Path, tiny_data_dir: Path, name: str, mode: str):
    """`ray` is replaced by a recorder of its arguments; what follows `--` is then run with --plan."""
    recorder = tmp_path / "ray"
    recorder.write_text(f'#!/bin/sh\n[ "$1" = job ] || exit 0\nwhile [ "$1" != -- ]; do shift; done; shift\nprintf "%s\\n" "$@" > {tmp_path}/command\n')
    recorder.chmod(0o755)
    env = os.environ | {
        "RAY": str(recorder), "HF_CHECKPOINT": str(tiny_model_dir), "PROMPT_DATA": str(tiny_data_dir / "train.jsonl"),
        "ENGINE_ADDRS": "127.0.0.1:30000 127.0.0.1:30001", "RECEIVER_ADDRS": "127.0.0.1:20500 127.0.0.1:20501",
        "RUN_DIR": str(tmp_path / "run"), "PYTHON": sys.executable,
    }  # fmt: skip
    result = bash(str(repo_root / "scripts" / name), env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    command = (tmp_path / "command").read_text().splitlines()
    planned = subprocess.run([*command, "--plan"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert f"mode {mode}" in planned.stdout


PLANS = [
    ("run-colocate.sh", "qwen2.5-0.5B", {"ACTOR_GPUS": "8"}, {"mode": "colocate", "num_gpus": 8, "rollout_offset": 0}),
    ("run-colocate.sh", "qwen3-30B-A3B", {"ACTOR_GPUS": "8", "ENGINE_GPUS": "8", "TP": "4", "EP": "8"}, {"mode": "colocate", "num_gpus": 8}),
    ("run-colocate.sh", "glm4.5-355B-A32B", {"ACTOR_NODES": "16", "ACTOR_GPUS": "8", "ENGINE_GPUS": "32", "TP": "8", "PP": "4", "EP": "32"}, {"num_gpus": 128}),
    ("run-disaggregated.sh", "qwen3-8B", {"ACTOR_GPUS": "8", "ROLLOUT_GPUS": "8"}, {"mode": "disaggregated", "num_gpus": 16, "rollout_offset": 8}),
    ("run-disaggregated.sh", "llama3.1-8B", {"ACTOR_GPUS": "4", "ROLLOUT_GPUS": "4"}, {"num_gpus": 8, "rollout_offset": 4}),
    ("run-interleaved.sh", "qwen3-8B", {"ACTOR_GPUS": "8", "TP": "2", "PP": "4", "CHUNKS": "3", "ROLLOUT_GPUS": "8"}, {"num_gpus": 16, "rollout_offset": 8}),
    ("run-external.sh", "qwen3-4B", {"ENGINE_ADDRS": "10.0.0.1:10091 10.0.0.2:10091"}, {"mode": "external", "num_gpus": 2, "rollout_offset": 0}),
    ("run-roles.sh", "tiny-qwen3", {}, {"mode": "disaggregated", "num_gpus": 5, "rollout_offset": 4}),
    (
        "run-roles.sh",
        "qwen3-1.7B",
        {"ACTOR_GPUS": "4", "CRITIC_GPUS": "4", "REWARD_GPUS": "4", "REF_GPUS": "2", "ROLLOUT_GPUS": "2"},
        {"num_gpus": 16, "rollout_offset": 14},
    ),
    ("run-algorithms.sh", "qwen3-4B", {"ALGORITHM": "icepop", "ACTOR_GPUS": "8"}, {"mode": "colocate", "num_gpus": 8}),
    ("run-algorithms.sh", "tiny-qwen3", {"ALGORITHM": "distillation", "TEACHER": "/nowhere/teacher"}, {"mode": "colocate", "num_gpus": 2}),
    ("run-reward-model.sh", "tiny-qwen3", {}, {"mode": "disaggregated", "num_gpus": 3, "rollout_offset": 2}),
    ("run-reward-model.sh", "qwen3-8B", {"TP": "4", "ACTOR_GPUS": "4", "ROLLOUT_GPUS": "4", "REWARD_GPUS": "2"}, {"num_gpus": 10, "rollout_offset": 6}),
    ("run-routing-replay.sh", "tiny-qwen3-moe", {"REPLAY": "trainer"}, {"mode": "colocate", "num_gpus": 2}),
    ("run-routing-replay.sh", "qwen3-30B-A3B", {"ACTOR_GPUS": "8", "ENGINE_GPUS": "8", "TP": "4", "EP": "8"}, {"mode": "colocate", "num_gpus": 8}),
    ("run-debug-rollout-only.sh", "glm4-9B", {"ROLLOUT_GPUS": "8"}, {"mode": "rollout_only", "num_gpus": 8, "rollout_offset": 0}),
    ("run-debug-train-only.sh", "mimo-7B", {"ACTOR_GPUS": "8", "TP": "8"}, {"mode": "train_only", "num_gpus": 8}),
]


@pytest.mark.parametrize(("name", "model", "sizes", "expected"), PLANS, ids=lambda value: value if isinstance(value, str) else None)
def test_run_scripts_plan_without_starting_anything(repo_root: Path, tmp_path: Path, name: str, model: str, sizes: dict, expected: dict):
    """--plan at the end of a script: no Ray, no checkpoint, nothing written; the plan has the sizes that the variables ask for."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY": "/nowhere/ray", "PYTHON": sys.executable, "MODEL": model} | sizes
    result = bash(str(repo_root / "scripts" / name), "--plan", "json", env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    plan = json.loads(result.stdout)
    assert {key: plan[key] for key in expected} == expected
    assert list(tmp_path.iterdir()) == []


def test_another_model_than_the_tiny_one_needs_its_checkpoint(repo_root: Path):
    result = bash(str(repo_root / "scripts/run-colocate.sh"), env=os.environ | {"MODEL": "qwen3-8B", "PYTHON": sys.executable, "RAY": "/nowhere/ray"})
    assert result.returncode == 2 and "HF_CHECKPOINT" in result.stderr and "--plan" in result.stderr


@pytest.mark.slow
def test_external_without_addresses_says_how_to_start_one(repo_root: Path, tiny_model_dir: Path, tiny_data_dir: Path):
    env = os.environ | {"HF_CHECKPOINT": str(tiny_model_dir), "PROMPT_DATA": str(tiny_data_dir / "train.jsonl"), "PYTHON": sys.executable}
    result = bash(str(repo_root / "scripts/run-external.sh"), env={k: v for k, v in env.items() if k != "ENGINE_ADDRS"})
    assert result.returncode == 2 and "sglang.launch_server" in result.stderr


@pytest.mark.parametrize("arguments", [["--rollouts"], ["--rollouts", "many"], ["--rollouts", "0"], ["--what", "1"]])
def test_quickstart_refuses_bad_options(repo_root: Path, arguments: list[str]):
    result = bash(str(repo_root / "scripts/quickstart.sh"), *arguments)
    assert result.returncode == 2 and result.stderr.startswith("quickstart: ")
