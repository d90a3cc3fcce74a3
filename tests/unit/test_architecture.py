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
    return sorted(
        [*root.glob("*.py"), *(p for name in (PACKAGE, "scripts", "benchmarks") for p in (root / name).rglob("*.py"))]
    )


def test_layers(repo_root: Path):
    assert checks.layer_violations(repo_root / PACKAGE) == []


def test_fences(repo_root: Path):
    assert checks.fence_violations(repo_root / PACKAGE) == []


def test_no_import_cycles(repo_root: Path):
    assert checks.import_cycles(repo_root / PACKAGE) == []


def test_every_module_has_its_test(repo_root: Path):
    assert checks.mirror_violations(repo_root / PACKAGE, repo_root / "tests", rules.TESTED_ELSEWHERE) == []


def test_sizes(repo_root: Path):
    assert checks.size_violations(source_files(repo_root), repo_root) == []


def test_names(repo_root: Path):
    folders = [p for name in rules.NAMED_FOLDERS for p in sorted((repo_root / name).rglob("*.py"))]
    assert checks.name_violations([*sorted(repo_root.glob("*.py")), *folders], repo_root) == []


def test_one_meaning_a_class_name(repo_root: Path):
    assert checks.class_name_violations(repo_root / PACKAGE) == []


def test_test_files_are_short_too(repo_root: Path):
    long = {
        p.name: n
        for p in (repo_root / "tests").rglob("*.py")
        if (n := len(p.read_text().splitlines())) > rules.MAX_FILE_LINES
    }
    assert long == {}


def test_nothing_else_at_the_top(repo_root: Path):
    command = ["git", "-C", str(repo_root), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} - rules.TOP_LEVEL == set()


def test_a_tree_that_keeps_the_rules_passes(tmp_path: Path):
    files = {
        "records.py": "import slime_like.errors\n",
        "errors.py": "",
        "cluster/build.py": "import ray\nfrom slime_like import records\n",
    }
    package = write_tree(tmp_path, files)
    assert checks.layer_violations(package) == checks.fence_violations(package) == checks.import_cycles(package) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"records.py": "from slime_like.rollout import buffer\n", "rollout/buffer.py": ""},
            "records:1 imports rollout, which is not below it.",
        ),
        (
            {"algorithms/a.py": "from slime_like.planning.p import x\n", "planning/p.py": "x = 1\n"},
            "algorithms.a:1 imports planning, which is not below it.",
        ),
        (
            {"errors.py": "def late():\n    from slime_like import cluster\n", "cluster/b.py": ""},
            "errors:2 imports cluster, which is not below it.",
        ),
        (
            {"errors.py": "import importlib\nimportlib.import_module('slime_like.cluster')\n"},
            "errors:2 imports cluster, which is not below it.",
        ),
        (
            {"rollout/a.py": "from ..cluster import b\n", "cluster/b.py": ""},
            "rollout.a:1 imports cluster, which is not below it.",
        ),
        (
            {"loops/a.py": "import slime_like.testing.engine\n", "testing/engine.py": ""},
            "loops.a:1 imports testing, which is for tests only.",
        ),
        ({"helpers/a.py": ""}, "helpers: 'helpers' has no layer. Fix: add it to LAYERS."),
        (
            {"cluster/a.py": "from arguments import parse_args\n"},
            "cluster.a:1 imports arguments, which stands outside the package.",
        ),
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
    (violation,) = checks.fence_violations(write_tree(tmp_path, {name: text}))
    assert "; allowed only in " in violation


def test_a_fence_lets_its_own_modules_through(tmp_path: Path):
    package = write_tree(
        tmp_path,
        {"weight_sync/transports/ipc.py": "import torch, sglang\n", "sglang_backend/cpu_server.py": "import sglang\n"},
    )
    assert checks.fence_violations(package) == []


def test_an_import_cycle_is_found(tmp_path: Path):
    files = {
        "rollout/a.py": "from slime_like.rollout.b import x\n",
        "rollout/b.py": "from . import c\n",
        "rollout/c.py": "from slime_like.rollout import a\n",
    }
    assert checks.import_cycles(write_tree(tmp_path, files)) == ["import cycle: rollout.a <-> rollout.b <-> rollout.c"]


LOGIC = "def f():\n    return 1\n"
MIRROR, OTHER = "unit/rollout/test_a.py", "e2e/test_x.py"


@pytest.mark.parametrize(
    ("tests", "elsewhere", "messages"),
    [
        ({MIRROR: "from slime_like.rollout.a import f\n"}, {}, []),
        ({OTHER: "from slime_like.rollout.a import f\n"}, {"rollout.a": (OTHER,)}, []),
        ({OTHER: "from slime_like.rollout import a\n"}, {"rollout.a": (OTHER,)}, []),
        ({OTHER: "COMMAND = 'python -m slime_like.rollout.a'\n"}, {"rollout.a": (OTHER,)}, []),
        (
            {OTHER: "from tests.helpers.x import f\n", "helpers/x.py": "import slime_like.rollout.a\n"},
            {"rollout.a": (OTHER,)},
            [],
        ),
        ({OTHER: "import slime_like.rollout.a\n"}, {"rollout.a": (OTHER,)}, []),
        ({OTHER: "# It is killed while slime_like/rollout/a.py waits.\n"}, {"rollout": (OTHER,)}, []),
        (
            {},
            {},
            [f"rollout.a has no tests/{MIRROR}. Fix: write it, or name the tests that cover it in TESTED_ELSEWHERE."],
        ),
        ({}, {"rollout.a": (OTHER,)}, [f"TESTED_ELSEWHERE: rollout.a: there is no tests/{OTHER}."]),
        ({}, {"rollout.a": ()}, ["TESTED_ELSEWHERE: rollout.a names no test."]),
        (
            {OTHER: ""},
            {"rollout.a": (OTHER,)},
            [f"TESTED_ELSEWHERE: rollout.a: tests/{OTHER} neither imports nor names it."],
        ),
        (
            {OTHER: "import slime_like.rollout.ab\n"},
            {"rollout.a": (OTHER,)},
            [f"TESTED_ELSEWHERE: rollout.a: tests/{OTHER} neither imports nor names it."],
        ),
        (
            {MIRROR: "import slime_like.rollout.a\n", OTHER: "import slime_like.rollout.a\n"},
            {"rollout.a": (OTHER,)},
            ["TESTED_ELSEWHERE: rollout.a has its mirror, or nothing to test. Fix: take the entry out."],
        ),
        (
            {MIRROR: "import slime_like.rollout.a\n"},
            {"rollout.b": (MIRROR,)},
            [
                "TESTED_ELSEWHERE: there is no module rollout.b.",
                f"TESTED_ELSEWHERE: rollout.b: tests/{MIRROR} neither imports nor names it.",
            ],
        ),
    ],
)
def test_a_module_without_its_test_is_found(
    tmp_path: Path, tests: dict[str, str], elsewhere: dict[str, tuple[str, ...]], messages: list[str]
):
    package = write_tree(tmp_path, {"rollout/a.py": LOGIC, "rollout/data.py": "class A:\n    x: int = 1\n"})
    for name, text in tests.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert checks.mirror_violations(package, tmp_path / "tests", elsewhere) == messages


def test_a_package_with_logic_of_its_own_has_a_test_too(tmp_path: Path):
    package = write_tree(tmp_path, {"rollout/a.py": ""})
    (package / "rollout/__init__.py").write_text(LOGIC)
    (violation,) = checks.mirror_violations(package, tmp_path / "tests", {})
    assert violation.startswith("rollout has no tests/unit/test_rollout.py.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n" * 401, "slime_like/a.py: 401 lines, limit 400"),
        ("def long():\n" + "    x = 1\n" * 60, "slime_like/a.py:1 long: 61 lines, limit 60"),
        (
            "class C:\n    def wide(self, a, b, c, d, e, f, g, *, h, i): ...\n",
            "slime_like/a.py:2 wide: 9 parameters, limit 8",
        ),
    ],
)
def test_too_much_is_found(tmp_path: Path, text: str, message: str):
    package = write_tree(tmp_path, {"a.py": text})
    (violation,) = checks.size_violations([package / "a.py"], tmp_path)
    assert violation.startswith(message)


def test_just_enough_is_not_too_much(tmp_path: Path):
    package = write_tree(tmp_path, {"a.py": "def f(a, b, c, d, e, f, g, h):\n" + "    x = 1\n" * 59 + "\n" * 340})
    assert checks.size_violations([package / "a.py"], tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "x, *found = 1, 2",
        "for told in (): pass",
        "with open('x') as made: pass",
        "x = [1 for found in ()]",
        "if (found := 1): pass",
        "class C:\n    made: int = 1",
        "def f(told): ...",
        "def f(*, made=1): ...",
        "f = lambda *found: 1",
        "x.told = 1",
        "x._told = 1",
        "def made(): ...",
        "async def _made(): ...",
        "import os as found",
        "try: pass\nexcept OSError as told: pass",
        "match 1:\n    case found: pass",
    ],
)
def test_a_vague_name_is_found(tmp_path: Path, text: str):
    (tmp_path / "a.py").write_text(text)
    (violation,) = checks.name_violations([tmp_path / "a.py"], tmp_path)
    assert violation.startswith("a.py:") and violation.endswith(": says nothing of what it is. Fix: name the thing.")


def test_words_and_longer_names_are_no_vague_names(tmp_path: Path):
    text = '"""What was found."""\nnot_found = "told"  # made\nprint(other.found, f"{not_found} made")\nf(found=1)\n'
    (tmp_path / "a.py").write_text(text)
    assert checks.name_violations([tmp_path / "a.py"], tmp_path) == []


def test_two_classes_of_one_name_are_found(tmp_path: Path):
    files = {"a.py": "class Slot: ...\nclass _Own: ...\n", "rollout/b.py": "class Slot: ...\nclass _Own: ...\n"}
    assert checks.class_name_violations(write_tree(tmp_path, files)) == [
        "Slot is a class of a and rollout.b. Fix: a name for each."
    ]


def test_the_entry_points_have_limits_of_their_own(tmp_path: Path):
    (tmp_path / "train.py").write_text("x = 1\n" * 101)
    assert checks.size_violations([tmp_path / "train.py"], tmp_path) == [
        "train.py: 101 lines, limit 100. Fix: split by responsibility."
    ]
