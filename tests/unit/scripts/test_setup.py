"""setup.sh on a stand-in for Python: what it runs, when it does nothing, how it mends, what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

#: Plays both the host's Python and the one in .venv: notes its arguments; `-m venv` copies it; fails what FAIL names.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"${CALLS}"
if [[ -n "${FAIL:-}" && "$*" == *"${FAIL}"* ]]; then echo "ERROR: the registry is on fire"; exit 1; fi
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [[ "$*" == "-m pip check" ]]; then printf '%s\\n' "${PIP_CHECK:-}"; fi
exit 0
"""


class Tree:
    """A copy of what setup.sh needs, with the stand-in for Python."""

    def __init__(self, folder: Path, root: Path):
        self.folder, self.calls_file = folder, folder / "calls"
        shutil.copytree(root / "scripts" / "requirements", folder / "scripts" / "requirements")
        for name in ("scripts/setup.sh", "setup.py"):
            shutil.copyfile(root / name, folder / name)
        (folder / "python").write_text(STAND_IN)
        (folder / "python").chmod(0o755)

    def setup(self, *options: str, **env: str) -> subprocess.CompletedProcess:
        """Run setup.sh, having forgotten earlier calls."""
        self.calls_file.unlink(missing_ok=True)
        environment = os.environ | {"PYTHON": str(self.folder / "python"), "CALLS": str(self.calls_file)} | env
        command = ["bash", str(self.folder / "scripts/setup.sh"), *(options or ("--cpu",))]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    def installs(self) -> list[str]:
        """The pip installations of the last run."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line.split(" install ")[1] for line in lines if " install " in line]


@pytest.fixture
def tree(tmp_path: Path, repo_root: Path) -> Tree:
    return Tree(tmp_path, repo_root)


def test_stages_run_in_order(tree: Tree):
    assert tree.setup().returncode == 0
    torch, packages, sglang, project = tree.installs()
    assert "torch==2.13.0+cpu" in torch
    assert "-c scripts/requirements/constraints-cpu.txt -r scripts/requirements/cpu.txt" in packages
    assert "--no-deps -r scripts/requirements/cpu-nodeps.txt" in sglang
    assert "--no-deps --no-build-isolation -e ." in project


def test_a_second_run_does_nothing(tree: Tree):
    tree.setup()
    again = tree.setup()
    assert (again.returncode, again.stdout, tree.installs()) == (0, "", [])


@pytest.mark.parametrize("name", ["scripts/requirements/cpu.txt", "setup.py", "scripts/setup.sh"])
def test_a_changed_input_runs_it_again(tree: Tree, name: str):
    tree.setup()
    with open(tree.folder / name, "a") as file:
        file.write("\n# changed\n")
    assert tree.setup().returncode == 0 and len(tree.installs()) == 4


def test_an_interrupted_run_starts_anew(tree: Tree):
    tree.setup()
    (tree.folder / ".venv/unfinished").write_text("packages\n")
    (tree.folder / ".venv/half-written").touch()
    result = tree.setup()
    assert result.returncode == 0 and 'interrupted during "packages"' in result.stdout
    assert len(tree.installs()) == 4 and not (tree.folder / ".venv/half-written").exists()


def test_a_failed_stage_shows_its_log_and_the_next_run_goes_on(tree: Tree):
    failed = tree.setup(FAIL="cpu-nodeps.txt")
    assert failed.returncode == 1
    assert "sglang (no dependencies) failed" in failed.stderr and "the registry is on fire" in failed.stderr
    mended = tree.setup()
    assert mended.returncode == 0 and "interrupted" not in mended.stdout


def test_torch_comes_from_the_cpu_index_where_the_usual_one_lacks_it(tree: Tree):
    # The second try differs only in the index, so failing what begins the first one's arguments is enough.
    assert tree.setup(FAIL="--progress-bar off torch==").returncode == 0
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in tree.installs()[1]


def test_an_expected_line_of_pip_check_passes_and_another_fails(tree: Tree, repo_root: Path):
    expected = (repo_root / "scripts/requirements/pip-check-expected.txt").read_text().splitlines()[0]
    assert tree.setup(PIP_CHECK=expected).returncode == 0
    (tree.folder / ".venv/setup.stamp").unlink()
    failed = tree.setup(PIP_CHECK="ray 2.60.0 requires click, which is not installed.")
    assert failed.returncode == 1 and "ray 2.60.0 requires click" in failed.stderr


def test_a_gpu_host_gets_stock_packages(tree: Tree):
    assert tree.setup("--gpu").returncode == 0
    assert any(".[gpu,dev]" in line for line in tree.installs())
    assert not any("torch==" in line for line in tree.installs())


def test_without_the_right_python_it_says_what_to_install(tree: Tree):
    result = tree.setup(PYTHON=str(tree.folder / "no-python"))
    assert result.returncode == 1 and "apt-get install python3.11 python3.11-venv" in result.stderr
    assert not (tree.folder / ".venv").exists()


def test_without_the_venv_module_it_names_the_debian_package(tree: Tree):
    result = tree.setup(FAIL="import ensurepip")
    assert result.returncode == 1 and "apt-get install python3.11-venv" in result.stderr


def test_unknown_options_are_refused(tree: Tree):
    result = tree.setup("--tpu")
    assert result.returncode == 1 and "--tpu" in result.stderr
