"""setup.py's ranges, the pinned versions, and what is installed agree."""

from __future__ import annotations

import importlib.metadata
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

#: Installed by its own extra only, so it has no pin in the CPU constraints.
GPU_ONLY = {"transformer-engine"}


@pytest.fixture(scope="module")
def metadata(repo_root: Path) -> dict:
    """The keyword arguments that setup.py hands to setuptools."""
    import setuptools

    captured: dict = {}
    original = setuptools.setup
    setuptools.setup = captured.update  # setup.py does nothing but this call
    try:
        runpy.run_path(str(repo_root / "setup.py"))
    finally:
        setuptools.setup = original
    return captured


@pytest.fixture(scope="module")
def pins(repo_root: Path) -> dict[str, Version]:
    return pins_of(repo_root / "scripts/requirements/constraints-cpu.txt")


def pins_of(path: Path) -> dict[str, Version]:
    pairs = [line.split("==") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def names(path: Path) -> list[Requirement]:
    return [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_pins_lie_within_the_ranges(repo_root: Path, metadata: dict, pins: dict[str, Version]):
    for extra in ("envs", "ifbench"):
        extra_pins = pins_of(repo_root / f"scripts/requirements/{extra}.txt")
        assert not set(extra_pins) & set(pins), "one version a package"
        pins = pins | extra_pins
    texts = metadata["install_requires"] + [text for extra in metadata["extras_require"].values() for text in extra]
    requirements = [Requirement(text) for text in texts]
    wrong = [
        f"{r} but {pins.get(canonicalize_name(r.name))} is pinned"
        for r in requirements
        if r.name not in GPU_ONLY
        and not r.specifier.contains(pins.get(canonicalize_name(r.name), Version("0")), prereleases=True)
    ]
    assert wrong == []


def test_the_stack_that_the_project_stands_on_is_declared(metadata: dict):
    declared = {Requirement(text).name for text in metadata["install_requires"] + metadata["extras_require"]["gpu"]}
    assert {"megatron-core", "sglang", "ray", "torch", "transformer-engine", "sglang-router", "requests"} <= declared
    assert set(metadata["extras_require"]) >= {"cpu", "gpu", "dev"}
    assert metadata["python_requires"] == ">=3.11"


def test_everything_that_is_installed_by_name_is_pinned(repo_root: Path, pins: dict[str, Version]):
    folder = repo_root / "scripts" / "requirements"
    for requirement in names(folder / "cpu.txt") + names(folder / "cpu-nodeps.txt"):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None and requirement.specifier.contains(version, prereleases=True), requirement


def test_every_pin_is_installed_as_pinned(pins: dict[str, Version]):
    assert {name: Version(importlib.metadata.version(name)) for name in pins} == pins


def test_every_package_folder_is_packaged(repo_root: Path, metadata: dict):
    folders = {".".join(path.parent.relative_to(repo_root).parts) for path in (repo_root / "slime_like").rglob("*.py")}
    assert set(metadata["packages"]) == folders
    assert not {"tests", "scripts", "train"} & set(metadata["packages"])


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_says_that_it_is_typed(repo_root: Path, tmp_path: Path):
    tree = tmp_path / "tree"
    shutil.copytree(repo_root / "slime_like", tree / "slime_like", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(repo_root / name, tree / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (wheel,) = tmp_path.glob("slime_like-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        path.relative_to(tree).as_posix() for path in (tree / "slime_like").rglob("*") if path.suffix == ".py"
    } | {"slime_like/py.typed"}
