"""The repository keeps the rules of architecture.py, and each rule can fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import architecture as rules
import architecture_checks as checks
import pytest

PACKAGE = "slime_like"


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """A package `slime_like` of the given files, each folder with an __init__.py."""
    package = folder / PACKAGE
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return package


def source_files(root: Path) -> list[Path]:
    return sorted([*root.glob("*.py"), *(p for name in (PACKAGE, "scripts", "benchmarks") for p in (root / name).rglob("*.py"))])


def test_layers(repo_root: Path):
    assert checks.layer_violations(repo_root / PACKAGE) == []


def test_fences(repo_root: Path):
    assert checks.fence_violations(repo_root / PACKAGE) == []


def test_no_import_cycles(repo_root: Path):
    assert checks.import_cycles(repo_root / PACKAGE) == []


def test_sizes(repo_root: Path):
    assert checks.size_violations(source_files(repo_root), repo_root) == []


def test_test_files_are_short_too(repo_root: Path):
    long = {p.name: n for p in (repo_root / "tests").rglob("*.py") if (n := len(p.read_text().splitlines())) > rules.MAX_FILE_LINES}
    assert long == {}


def test_nothing_else_at_the_top(repo_root: Path):
    command = ["git", "-C", str(repo_root), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} - rules.TOP_LEVEL == set()


def test_a_tree_that_keeps_the_rules_passes(tmp_path: Path):
    files = {"records.py": "import slime_like.errors\n", "errors.py": "", "cluster/build.py": "import ray\nfrom slime_like import records\n"}
    package = write_tree(tmp_path, files)
    assert checks.layer_violations(package) == checks.fence_violations(package) == checks.import_cycles(package) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"records.py": "from slime_like.rollout import buffer\n", "rollout/buffer.py": ""}, "records:1 imports rollout, which is not below it."),
        ({"algorithms/a.py": "from slime_like.planning.p import x\n", "planning/p.py": "x = 1\n"}, "algorithms.a:1 imports planning, which is not below it."),
        ({"errors.py": "def late():\n    from slime_like import cluster\n", "cluster/b.py": ""}, "errors:2 imports cluster, which is not below it."),
        ({"errors.py": "import importlib\nimportlib.import_module('slime_like.cluster')\n"}, "errors:2 imports cluster, which is not below it."),
        ({"rollout/a.py": "from ..cluster import b\n", "cluster/b.py": ""}, "rollout.a:1 imports cluster, which is not below it."),
        ({"loops/a.py": "import slime_like.testing.engine\n", "testing/engine.py": ""}, "loops.a:1 imports testing, which is for tests only."),
        ({"helpers/a.py": ""}, "helpers: 'helpers' has no layer. Fix: add it to LAYERS."),
        ({"cluster/a.py": "from arguments import parse_args\n"}, "cluster.a:1 imports arguments, which stands outside the package."),
        ({"cluster/a.py": "import train\n"}, "cluster.a:1 imports train, which stands outside the package."),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, files: dict[str, str], message: str):
    assert message in checks.layer_violations(write_tree(tmp_path, files))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rollout/a.py", "import torch\n"),
        ("rollout/a.py", "def late():\n    from torch.nn import Linear\n"),
        ("loops/a.py", "import ray\n"),
        ("cluster/a.py", "from megatron.core import parallel_state\n"),
        ("sglang_backend/client.py", "from sglang.srt import x\n"),
    ],
)
def test_a_broken_fence_is_found(tmp_path: Path, name: str, text: str):
    (found,) = checks.fence_violations(write_tree(tmp_path, {name: text}))
    assert "; allowed only in " in found


def test_a_fence_lets_its_own_modules_through(tmp_path: Path):
    package = write_tree(tmp_path, {"weight_sync/ipc.py": "import torch, sglang\n", "sglang_backend/cpu_server.py": "import sglang\n"})
    assert checks.fence_violations(package) == []


def test_an_import_cycle_is_found(tmp_path: Path):
    files = {"rollout/a.py": "from slime_like.rollout.b import x\n", "rollout/b.py": "from . import c\n", "rollout/c.py": "from slime_like.rollout import a\n"}
    assert checks.import_cycles(write_tree(tmp_path, files)) == ["import cycle: rollout.a <-> rollout.b <-> rollout.c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n" * 401, "slime_like/a.py: 401 lines, limit 400"),
        ("def long():\n" + "    x = 1\n" * 60, "slime_like/a.py:1 long: 61 lines, limit 60"),
        ("class C:\n    def wide(self, a, b, c, d, e, f, g, *, h, i): ...\n", "slime_like/a.py:2 wide: 9 parameters, limit 8"),
    ],
)
def test_too_much_is_found(tmp_path: Path, text: str, message: str):
    package = write_tree(tmp_path, {"a.py": text})
    (found,) = checks.size_violations([package / "a.py"], tmp_path)
    assert found.startswith(message)


def test_just_enough_is_not_too_much(tmp_path: Path):
    package = write_tree(tmp_path, {"a.py": "def f(a, b, c, d, e, f, g, h):\n" + "    x = 1\n" * 59 + "\n" * 340})
    assert checks.size_violations([package / "a.py"], tmp_path) == []


def test_the_entry_points_have_limits_of_their_own(tmp_path: Path):
    (tmp_path / "train.py").write_text("x = 1\n" * 101)
    assert checks.size_violations([tmp_path / "train.py"], tmp_path) == ["train.py: 101 lines, limit 100. Fix: split by responsibility."]
