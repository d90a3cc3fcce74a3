"""The shell scripts hold together: strict mode, known flags, nothing killed by name, set-up that says what is wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.utils.net import free_port
from tests.helpers.other_user import UID, heard, needs_root, stranger_listening

RUN_SCRIPTS = ("run-colocate.sh", "run-disaggregated.sh", "run-external.sh", "run-env.sh")


def shell_files(root: Path) -> list[Path]:
    return [root / ".ci" / "run", *sorted((root / "scripts").rglob("*.sh"))]


def bash(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *command], capture_output=True, text=True, timeout=120, check=False, env=env, cwd=cwd
    )


def test_every_file_parses(repo_root: Path):
    for path in shell_files(repo_root):
        assert bash("-n", str(path)).returncode == 0, path


def test_programs_are_strict_and_kill_nothing_by_name(repo_root: Path):
    for path in shell_files(repo_root):
        text = path.read_text()
        if text.startswith("#!"):
            assert "\nset -euo pipefail\n" in text, path
        assert not re.search(r"\b(pkill|killall|ray stop)\b(?!\")", text), path


@pytest.mark.parametrize("name", [*RUN_SCRIPTS, "quickstart.sh", "run-smollm2.sh"])
def test_every_flag_is_known(repo_root: Path, name: str):
    known = {
        option
        for line in (repo_root / "tests/unit/flags.txt").read_text().splitlines()
        for option in line.split(" = ")[0].split(", ")
    }
    text = re.sub(r"<<TEXT\n.*?\nTEXT\n", "", (repo_root / "scripts" / name).read_text(), flags=re.DOTALL)
    arrays = re.findall(r"^[A-Z_]+_ARGS=\(\n(.*?)^\)", text, flags=re.DOTALL | re.MULTILINE)
    flags = {word for body in arrays for word in re.findall(r"(?<!\S)--[a-z0-9-]+", body)}
    assert len(flags) > 20
    assert {flag for flag in flags if not flag.startswith("--sglang-")} - known == set()


@pytest.mark.parametrize("name", RUN_SCRIPTS)
def test_the_host_chooses_the_attention(repo_root: Path, name: str):
    # flash needs flash-attn, which no set of packages here has. auto is the default too.
    text = (repo_root / "scripts" / name).read_text()
    assert set(re.findall(r"^  --attention-backend (\S+)$", text, re.MULTILINE)) <= {"auto"}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("run-colocate.sh", "colocate"),
        ("run-disaggregated.sh", "disaggregated"),
        ("run-async.sh", "disaggregated"),
        ("run-external.sh", "external"),
        ("run-env.sh", "colocate"),
        ("run-agent.sh", "colocate"),
        ("run-lora.sh", "colocate"),
    ],
)
@pytest.mark.slow
def test_run_scripts_submit_a_command_that_plans(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, tiny_data_dir: Path, name: str, mode: str
):
    """`ray` is replaced by a recorder of its arguments; what follows `--` is then run with --plan."""
    recorder = tmp_path / "ray"
    recorder.write_text(
        '#!/bin/sh\n[ "$1" = job ] || exit 0\nwhile [ "$1" != -- ]; do shift; done; shift\nprintf "%s\\n" "$@" >'
        f" {tmp_path}/command\n"
    )
    recorder.chmod(0o755)
    env = os.environ | {
        "RAY": str(recorder), "HF_CHECKPOINT": str(tiny_model_dir), "PROMPT_DATA": str(tiny_data_dir / "train.jsonl"),
        "ENGINE_ADDRS": "127.0.0.1:30000 127.0.0.1:30001", "RUN_DIR": str(tmp_path / "run"), "PYTHON": sys.executable,
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:  # as if a job server of ours ran
        address = {"RAY_JOB_ADDRESS": f"http://127.0.0.1:{server.getsockname()[1]}"}
        result = bash(str(repo_root / "scripts" / name), env=env | address, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    command = (tmp_path / "command").read_text().splitlines()
    planned = subprocess.run(
        [*command, "--plan"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert f"mode {mode}" in planned.stdout


PLANS = [
    ("run-colocate.sh", "qwen2.5-0.5B", {"ACTOR_GPUS": "8"}, {"mode": "colocate", "num_gpus": 8, "rollout_offset": 0}),
    (
        "run-colocate.sh",
        "qwen3-30B-A3B",
        {"ACTOR_GPUS": "8", "ENGINE_GPUS": "8", "TP": "4", "EP": "8"},
        {"mode": "colocate", "num_gpus": 8},
    ),
    (
        "run-colocate.sh",
        "glm4.5-355B-A32B",
        {"ACTOR_NODES": "16", "ACTOR_GPUS": "8", "ENGINE_GPUS": "32", "TP": "8", "PP": "4", "EP": "32"},
        {"num_gpus": 128},
    ),
    (
        "run-disaggregated.sh",
        "qwen3-8B",
        {"ACTOR_GPUS": "8", "ROLLOUT_GPUS": "8"},
        {"mode": "disaggregated", "num_gpus": 16, "rollout_offset": 8},
    ),
    (
        "run-disaggregated.sh",
        "llama3.1-8B",
        {"ACTOR_GPUS": "4", "ROLLOUT_GPUS": "4"},
        {"num_gpus": 8, "rollout_offset": 4},
    ),
    (
        "run-external.sh",
        "qwen3-4B",
        {"ENGINE_ADDRS": "10.0.0.1:10091 10.0.0.2:10091"},
        {"mode": "external", "num_gpus": 2, "rollout_offset": 0},
    ),
]


@pytest.mark.parametrize(
    ("name", "model", "sizes", "expected"), PLANS, ids=lambda value: value if isinstance(value, str) else None
)
def test_run_scripts_plan_without_starting_anything(
    repo_root: Path, tmp_path: Path, name: str, model: str, sizes: dict, expected: dict
):
    """--plan at the end of a script: no Ray, no checkpoint, nothing written.

    The plan has the sizes that the variables ask for.
    """
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RAY": "/nowhere/ray",
        "PYTHON": sys.executable,
        "MODEL": model,
    } | sizes
    result = bash(str(repo_root / "scripts" / name), "--plan", "json", env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    plan = json.loads(result.stdout)
    assert {key: plan[key] for key in expected} == expected
    assert list(tmp_path.iterdir()) == []


def test_another_model_than_the_tiny_one_needs_its_checkpoint(repo_root: Path):
    result = bash(
        str(repo_root / "scripts/run-colocate.sh"),
        env=os.environ | {"MODEL": "qwen3-8B", "PYTHON": sys.executable, "RAY": "/nowhere/ray"},
    )
    assert result.returncode == 2 and "HF_CHECKPOINT" in result.stderr and "--plan" in result.stderr


@pytest.mark.slow
def test_external_without_addresses_says_how_to_start_one(repo_root: Path, tiny_model_dir: Path, tiny_data_dir: Path):
    env = os.environ | {
        "HF_CHECKPOINT": str(tiny_model_dir),
        "PROMPT_DATA": str(tiny_data_dir / "train.jsonl"),
        "PYTHON": sys.executable,
    }
    result = bash(str(repo_root / "scripts/run-external.sh"), env={k: v for k, v in env.items() if k != "ENGINE_ADDRS"})
    assert result.returncode == 2 and "sglang.launch_server" in result.stderr


@pytest.mark.parametrize("arguments", [["--rollouts"], ["--rollouts", "many"], ["--rollouts", "0"], ["--what", "1"]])
def test_quickstart_refuses_bad_options(repo_root: Path, arguments: list[str]):
    result = bash(str(repo_root / "scripts/quickstart.sh"), *arguments)
    assert result.returncode == 2 and result.stderr.startswith("quickstart: ")


#: A `ray` that writes down what it is asked, and with `start` opens a job server's port (for the seconds of a test).
FAKE_RAY = """#!{python}
import json, os, socket, subprocess, sys, time
with open({folder!r} + "/asked", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if sys.argv[1] == "start" and {serves}:
    server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--dashboard-port") + 1])))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"],
                     pass_fds=[server.fileno()], stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
"""


def submit(
    repo_root: Path, tmp_path: Path, *, serves: bool = True, **extra: str
) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """ensure_ray and submit as a run script calls them, with a `ray` of ours; what it was asked."""
    ray = tmp_path / "ray-command"
    ray.write_text(FAKE_RAY.format(python=sys.executable, folder=str(tmp_path), serves=serves))
    ray.chmod(0o755)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = (
        kept
        | {
            "HOME": str(tmp_path / "home"),
            "RAY_TMPDIR": str(tmp_path / "tmp"),
            "RAY": str(ray),
            "PYTHON": sys.executable,
            "MODEL": "tiny-qwen3",
        }
        | extra
    )
    code = (
        f"set -euo pipefail; ROOT={repo_root}; source {repo_root}/scripts/lib/run_common.sh; ensure_ray 2; submit"
        " --flag; env | grep ^RAY_AUTH || true"
    )
    done = bash("-c", code, env=env)
    asked = tmp_path / "asked"
    return done, [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []


def asked_address(asked: list[str]) -> str:
    return next(word.removeprefix("--address=") for word in asked if word.startswith("--address="))


@needs_root
def test_another_users_job_server_is_not_sent_the_token(repo_root: Path, tmp_path: Path):
    with stranger_listening() as (port, pipe):
        done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=f"http://127.0.0.1:{port}")
        assert done.returncode == 0, done.stderr
        assert heard(pipe) == b"", "not even a connection is made"
        assert f"another user of this host listens ({UID}" in done.stderr
        assert [words[0] for words in asked] == ["start", "job"]
        ours = int(asked[0][asked[0].index("--dashboard-port") + 1])
        assert ours != port and asked_address(asked[1]) == f"http://127.0.0.1:{ours}"
        # The next run finds it.
        done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=f"http://127.0.0.1:{port}")
        assert [words[0] for words in asked] == ["start", "job", "job"] and asked_address(
            asked[2]
        ) == f"http://127.0.0.1:{ours}"
        # Somebody who trusts that user says so.
        done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=f"http://127.0.0.1:{port}", RAY_JOB_OWNER=str(UID))
        assert asked_address(asked[3]) == f"http://127.0.0.1:{port}"


def test_our_own_job_server_is_used(repo_root: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=address)
    assert done.returncode == 0 and [words[0] for words in asked] == ["job"] and asked_address(asked[0]) == address


def test_a_job_gets_this_shells_nccl_switches(repo_root: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=address, NCCL_NVLS_ENABLE="1", NCCL_CUMEM_ENABLE="")
    assert done.returncode == 0, done.stderr
    (text,) = [word.partition("=")[2] for word in asked[0] if word.startswith("--runtime-env-json=")]
    variables = json.loads(text)["env_vars"]
    assert variables["NCCL_NVLS_ENABLE"] == "1" and "NCCL_CUMEM_ENABLE" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"


def test_a_job_server_on_another_host_is_used_and_nothing_is_started(repo_root: Path, tmp_path: Path):
    done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS="http://192.0.2.7:8265")
    assert (
        done.returncode == 0
        and [words[0] for words in asked] == ["job"]
        and asked_address(asked[0]) == "http://192.0.2.7:8265"
    )


def test_a_ray_of_ours_has_a_private_folder_and_a_private_key(repo_root: Path, tmp_path: Path):
    done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    folder, home = tmp_path / "tmp" / f"slime_like-{os.geteuid()}", tmp_path / "home" / ".ray"
    assert asked[0][asked[0].index("--temp-dir") + 1] == f"{folder}/ray"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, home, home / "auth_token")] == [0o700, 0o700, 0o600]
    assert len(bytes.fromhex((home / "auth_token").read_text())) == 32
    assert "RAY_AUTH_MODE=token" in done.stdout, "the head asks for the key, and the job is submitted with it"


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(repo_root: Path, tmp_path: Path):
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "tmp" / f"slime_like-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, UID, UID)
    done, asked = submit(repo_root, tmp_path, RAY_JOB_ADDRESS=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2 and "RAY_TMPDIR" in done.stderr and asked == []


def test_no_job_is_submitted_where_ours_does_not_listen(repo_root: Path, tmp_path: Path):
    done, asked = submit(repo_root, tmp_path, serves=False, RAY_JOB_ADDRESS=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1 and "does not listen" in done.stderr and [words[0] for words in asked] == ["start"]
