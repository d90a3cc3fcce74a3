"""Every file of scripts/examples parses and plans on a fresh checkout; every folder is explained."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from arguments import parse_args
from slime_like.config.run import GROUPS
from slime_like.planning.placement import cannot_run_yet
from slime_like.planning.report.render import make_report
from slime_like.utils.net import free_port

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "scripts" / "examples"

#: Example -> its mode and GPUs, as its README says.
MODES = {
    "algorithms": ("colocate", 2),
    "calculator": ("colocate", 1),
    "colocate": ("colocate", 2),
    "conversations": ("train_only", 1),
    "debug-rollout-only": ("rollout_only", 2),
    "debug-train-only": ("train_only", 2),
    "delta": ("disaggregated", 4),
    "disaggregated": ("disaggregated", 4),
    "external": ("external", 2),
    "guess": ("colocate", 1),
    "interleaved": ("disaggregated", 3),
    "own-functions": ("colocate", 2),
    "quantised-rollouts": ("colocate", 1),
    "reward-model": ("disaggregated", 3),
    "roles": ("disaggregated", 5),
    "routing-replay": ("colocate", 2),
}

#: Not configs of train.py: a client of a server, and what scripts/run-smollm2.sh is made of.
OTHERS = {"smollm2", "tinker-rl"}


def run_example(*arguments: str, home: Path) -> subprocess.CompletedProcess:
    """As a user types it, with nothing but this interpreter."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/run_example.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env, cwd=home)


def test_every_folder_is_planned_here():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()} - {"__pycache__"} - OTHERS
    assert {path.parent.name for path in EXAMPLES.glob("*/run.toml")} == folders == set(MODES)


@pytest.mark.parametrize("name", MODES)
def test_it_plans_and_makes_nothing(tmp_path, name):
    before = sorted(ROOT.glob("runs/tiny/*"))
    result = run_example(name, "--plan", "json", home=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    plan = json.loads(result.stdout)
    assert (plan["mode"], plan["num_gpus"], plan["problems"]) == (*MODES[name], [])
    assert sorted(ROOT.glob("runs/tiny/*")) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MODES)
def test_every_command_of_its_readme_plans(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # paths of config files are relative to the current directory
    text = (EXAMPLES / name / "README.md").read_text()
    commands = [
        shlex.split(line, comments=True)
        for line in text.splitlines()
        if line.startswith(("bash scripts/run_example.sh", "python train.py"))
    ]
    assert commands
    for words in commands:
        flags = words[2:] if words[0] == "python" else ["--config", f"scripts/examples/{words[2]}/run.toml", *words[3:]]
        command = parse_args([*[word for word in flags if word != "--plan"], "--plan"])
        report = make_report(command.config)
        assert not report.problems and not command.config.not_yet() and not cannot_run_yet(report.plan), words


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_changes_what_its_file_says(path):
    """Every key stands in a table, and what is laid over run.toml makes another run of it."""
    assert not re.search(r"^[a-z]", path.read_text().split("\n[")[0], flags=re.MULTILINE)
    base = parse_args(["--config", str(path.parent / "run.toml"), "--plan"]).config
    if path.name != "run.toml":
        over = parse_args(["--config", str(path.parent / "run.toml"), str(path), "--plan"]).config
        assert any(getattr(over, group) != getattr(base, group) for group in GROUPS if group != "observability")
    else:
        assert base.data.num_rollout == 3 and base.observability.run_name == path.parent.name


@pytest.mark.parametrize("name", MODES)
def test_readme_says_how_to_run_it_and_names_flags_that_there_are(name):
    text = (EXAMPLES / name / "README.md").read_text()
    assert 15 <= len(text.splitlines()) <= 30 and f"bash scripts/run_example.sh {name}" in text
    known = {
        option
        for line in (ROOT / "tests/unit/flags.txt").read_text().splitlines()
        for option in line.split(" = ")[0].split(", ")
    }
    named = re.findall(r"(?<![\w-])--[a-z0-9-]+[a-z0-9]", text)
    keys = [
        key
        for row in re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
        for key in re.findall(r"`([a-z][a-z0-9-]+)`", row)
    ]
    engine_own = {"--custom-weight-loader"}  # SGLang's
    assert {*named, *(f"--{key}" for key in keys)} - known - engine_own == set()
    for mentioned in re.findall(r"(?:docs|scripts)/[\w./+-]+\.(?:md|toml|sh)", text):
        assert (ROOT / mentioned).exists(), mentioned


def test_an_unknown_name_lists_the_examples(tmp_path):
    result = run_example("colcate", home=tmp_path)
    assert result.returncode == 2 and "no example 'colcate'" in result.stderr and "routing-replay/" in result.stderr


def test_larger_sizes_by_flags(tmp_path):
    flags = (
        "--actor-num-gpus-per-node 4 --critic-num-gpus-per-node 4 --reward-num-gpus-per-node 4 --ref-num-gpus-per-node"
        " 2 --rollout-num-gpus 2"
    )
    plan = json.loads(run_example("roles", *flags.split(), "--plan", "json", home=tmp_path).stdout)
    assert (plan["num_gpus"], plan["rollout_offset"]) == (16, 14)


#: Instead of the interpreter: an engine that listens, a run that waits for its end, and nothing else.
FAKE_PYTHON = """#!{python}
import os, signal, socket, sys, time
if "slime_like.sglang_backend.cpu_server" in sys.argv:
    listening = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
    kind = "engine"
elif "train.py" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    kind = "run"
else:
    sys.exit(0)
open({folder!r} + "/" + kind, "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_the_external_examples_engine_ends_with_it(tmp_path, number):
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON.format(python=sys.executable, folder=str(tmp_path)))
    fake.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(fake), "PORT": str(free_port())}
    # An ignored interrupt is inherited: this suite may run in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            ["bash", str(ROOT / "scripts/run_example.sh"), "external"], env=env, stdout=subprocess.DEVNULL
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        pids = [int(wait_for_text(tmp_path / kind)) for kind in ("engine", "run")]
        process.send_signal(number)
        assert process.wait(20) == (-number if number == signal.SIGKILL else 128 + signal.SIGTERM)
        ends = time.monotonic() + 20
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            assert time.monotonic() < ends, "left behind"
            time.sleep(0.05)
    finally:
        process.kill()


def wait_for_text(path: Path) -> str:
    """What a file holds once it is there."""
    ends = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < ends, path
        time.sleep(0.05)
    return path.read_text()
