"""What setup.sh installs by digest is what the constraints pin."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def lock(repo_root: Path):
    spec = importlib.util.spec_from_file_location("lock_digests", repo_root / "scripts" / "lib" / "lock_digests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(pin: str) -> str:
    name, version = pin.split("==")
    return f"{re.sub(r'[-_.]+', '-', name.partition('[')[0]).lower()}=={version}"


def test_every_pinned_package_has_a_digest_and_no_other(lock):
    files = sorted(lock.REQUIREMENTS.glob("hashes-cpu-*.txt"))
    assert [file.name for file in files] == ["hashes-cpu-cp311-x86_64.txt"]
    for file in files:
        lines = lock.pins(file)
        assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
        wanted = {plain(pin) for pin in lock.pins(lock.REQUIREMENTS / "constraints-cpu.txt")}
        assert {plain(line.partition(" ")[0]) for line in lines} == wanted and len(wanted) > 150


def test_a_package_without_a_digest_is_an_error(lock):
    package = {"metadata": {"name": "a", "version": "1"}, "download_info": {"archive_info": {"hashes": {}}}}
    with pytest.raises(KeyError, match="sha256"):
        lock.lines_of({"install": [package]})
