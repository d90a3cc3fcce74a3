"""--help, --plan and mistakes answer at once: nothing heavy is imported for them.

Timed in processor seconds of the new process: what it computes, not how long a loaded host lets it wait for a core.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import architecture as rules
import pytest

#: Runs train.py's main in a fresh interpreter, then reports on stderr what it imported.
PROBE = """
import json, sys
sys.path.insert(0, {root!r})
import train
try:
    status = train.main({argv!r})
except SystemExit as error:
    status = error.code
heavy = sorted(name for name in {heavy!r} if name in sys.modules)
print(json.dumps({{"status": status or 0, "heavy": heavy}}), file=sys.stderr)
"""

PLAN = [
    "--colocate",
    "--actor-num-gpus-per-node",
    "4",
    "--num-rollout",
    "1",
    "--rm-type",
    "math",
    "--rollout-batch-size",
    "4",
]
SIZES = ["--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--vocab-size", "320"]
FILE = ["--config", "scripts/examples/colocate/run.toml"]
MODEL = [*SIZES, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]


def probe(root: Path, argv: list[str]) -> tuple[dict, str, float]:
    """(report, standard output, processor seconds) of train.py with this command line."""
    code = PROBE.format(root=str(root), argv=argv, heavy=rules.HEAVY)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=root
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    return (
        json.loads(result.stderr.splitlines()[-1]),
        result.stdout,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        ([*PLAN, *MODEL, "--plan"], 0),
        ([*PLAN, *MODEL, "--plan", "json"], 0),
        ([*FILE, "--plan"], 0),
        (["--no-such-flag"], 2),
        (["--config", "nowhere.toml"], 2),
    ],
    ids=["help", "plan", "plan-json", "plan-of-a-file", "mistake", "mistake-in-a-file"],
)
def test_nothing_heavy_is_imported(repo_root: Path, argv: list[str], status: int):
    report, _, _ = probe(repo_root, argv)
    assert report == {"status": status, "heavy": []}


@pytest.mark.parametrize(("flags", "level"), [([], "WARNING"), (["--log-level", "debug"], "DEBUG")])
def test_the_driver_has_the_log_level(repo_root: Path, flags: list[str], level: str):
    code = (
        f"import logging, train; train.main({[*PLAN, *MODEL, '--plan', *flags]!r}); logger ="
        " logging.getLogger('slime_like.cluster'); "
    )
    code += "print(logging.getLevelName(logger.getEffectiveLevel()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=repo_root
    )
    assert result.stdout.splitlines()[-1] == level


def test_the_probe_sees_a_heavy_import(repo_root: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text("import transformers\ndef main(argv):\n    return 0\n")
    assert "transformers" in probe(tmp_path, [])[0]["heavy"]


@pytest.mark.parametrize(
    "argv", [["--help"], [*PLAN, *MODEL, "--plan"], [*FILE, "--plan"]], ids=["help", "plan", "plan-of-a-file"]
)
def test_it_answers_at_once(repo_root: Path, argv: list[str]):
    # The better of two: the first one may have to compile.
    assert min(probe(repo_root, argv)[2] for _ in range(2)) < rules.MAX_PLAN_SECONDS


def test_plan_json_is_one_object_and_nothing_else(repo_root: Path):
    _, out, _ = probe(repo_root, [*PLAN, *MODEL, "--plan", "json"])
    assert json.loads(out)["mode"] == "colocate"
