"""Which set of packages a host gets, why, and what is said where none fits."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

H100 = ("NVIDIA H100 80GB HBM3",) * 8


@pytest.fixture(scope="module")
def chooser(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("choose_set", repo_root / "scripts/lib/choose_set.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(
    ("gpus", "torch", "cuda", "expected", "uses_host_torch", "reason"),
    [
        ((), "", "", "cpu", False, "nvidia-smi lists no GPU"),
        ((), "2.11.0+cu130", "13.0", "cpu", False, "nvidia-smi lists no GPU"),
        (H100, "", "", "gpu-newest", False, "8 x NVIDIA H100 80GB HBM3, and Python {python} has no torch yet"),
        (H100, "2.11.0+cu130", "13.0", "gpu-torch211", True, "torch 2.11.0+cu130 for CUDA 13.0 is installed"),
        (H100, "2.11.0", "13.0", "gpu-torch211", True, "torch 2.11.0 for CUDA 13.0 is installed"),
        (H100, "2.14.1", "13.1", "gpu-newest", True, "torch 2.14.1 for CUDA 13.1 is installed"),
        # Kernels are compiled for one release of torch: not for its preview, its next patch, another CUDA or none.
        (H100, "2.11.0a0+nv26.02", "13.1", "gpu-newest", False, "is in no set"),
        (H100, "2.11.1", "13.0", "gpu-newest", False, "is in no set"),
        (H100, "2.11.0+cu128", "12.8", "gpu-newest", False, "torch 2.11.0+cu128 for CUDA 12.8 is in no set"),
        (H100, "2.11.0+cpu", "", "gpu-newest", False, "torch 2.11.0+cpu without CUDA is in no set"),
    ],
)
def test_the_set_follows_from_the_host(chooser, python, gpus, torch, cuda, expected, uses_host_torch, reason):
    host = chooser.Host(python=python, gpus=gpus, driver_cuda="13.0" if gpus else "", torch=torch, torch_cuda=cuda)
    choice = chooser.choose(host)
    assert (choice.chosen.name, choice.uses_host_torch) == (expected, uses_host_torch)
    assert reason.format(python=python) in choice.reason


def test_the_user_wins(chooser):
    gpu_host = chooser.Host(python="3.12", gpus=H100, driver_cuda="12.8", torch="2.11.0", torch_cuda="13.0")
    assert chooser.choose(gpu_host, kind="cpu").chosen.name == "cpu"
    named = chooser.choose(gpu_host, name="gpu-torch211")  # whatever the driver says: cuda-compat may be there
    assert (named.chosen.name, named.uses_host_torch) == ("gpu-torch211", True)
    image = chooser.choose(chooser.Host(python="3.12"), name="gpu-torch211")
    assert "nvidia-smi lists no GPU here" in image.reason and not image.uses_host_torch
    assert chooser.choose(chooser.Host(python="3.12"), kind="gpu").chosen.is_gpu


@pytest.mark.parametrize(
    ("host", "wish", "words"),
    [
        ({"python": "3.13"}, {}, ["Python 3.13", "3.11 and 3.12", "Fix: PYTHON="]),
        ({"python": "3.12"}, {"name": "gpu"}, ["--set gpu", "Known: cpu, gpu-torch211, gpu-newest"]),
        (
            {"python": "3.12", "gpus": H100, "driver_cuda": "12.8"},
            {},
            ["speaks CUDA 12.8", "needs CUDA 13", "Fix: a driver of version 580", "--cpu"],
        ),
    ],
)
def test_where_none_fits_the_message_has_the_fix(chooser, host, wish, words):
    with pytest.raises(chooser.NoSetError) as caught:
        chooser.choose(chooser.Host(**host), **wish)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_driver_that_tells_nothing_is_no_hindrance(chooser):
    assert chooser.choose(chooser.Host(python="3.12", gpus=H100)).chosen.name == "gpu-newest"


def pins_of(path: Path) -> dict[str, str]:
    lines = [line.split("==") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in lines}


def test_the_table_and_the_constraints_agree(repo_root: Path, chooser):
    folder = repo_root / "scripts" / "requirements"
    pythons, sets = chooser.read_table()
    assert {row.constraints for row in sets.values()} == {path.name for path in folder.glob("constraints-*.txt")}
    for row in sets.values():
        pins = pins_of(folder / row.constraints)
        assert (pins["torch"], pins["sglang"]) == (row.torch, row.sglang), row.name
    text = (repo_root / "scripts/setup.sh").read_text()
    assert re.search(r"^PYTHONS=\((.*)\)$", text, re.MULTILINE)[1].split() == pythons


def test_every_set_lies_within_the_ranges(repo_root: Path, chooser):
    text = (repo_root / "setup.py").read_text()
    ranges = [Requirement(word) for word in re.findall(r'"([a-z0-9-]+(?:\[[a-z,]+\])?[<>=][^"]*)"', text)]
    by_name = {requirement.name: requirement.specifier for requirement in ranges}
    assert {"torch", "sglang", "megatron-core", "transformers", "ray", "transformer-engine"} <= set(by_name)
    for row in chooser.read_table()[1].values():
        pins = pins_of(repo_root / "scripts/requirements" / row.constraints)
        if row.transformer_engine:
            pins["transformer-engine"] = row.transformer_engine
        wrong = {
            name: pins[name] for name, allowed in by_name.items() if name in pins and Version(pins[name]) not in allowed
        }
        assert wrong == {}, row.name


def test_the_table_is_read_whole(repo_root: Path, chooser):
    table = tomllib.loads((repo_root / "scripts/requirements/sets.toml").read_text())
    assert list(chooser.read_table()[1]) == list(table["sets"]) == ["cpu", "gpu-torch211", "gpu-newest"]
