"""Files that only other programs read (code hosts, pre-commit, editors) parse, and name commands and versions that are
there.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

FORMS = ("bug.yml", "feature.yml")


def load(root: Path, name: str) -> dict:
    return yaml.safe_load((root / name).read_text(encoding="utf-8"))


def assert_our_command(root: Path, command: str) -> None:
    """`bash script [option]`, where the script is there and knows the option."""
    bash, script, *options = shlex.split(command)
    assert bash == "bash" and (root / script).is_file()
    for option in options:
        assert re.search(rf"^ +{re.escape(option)}\)", (root / script).read_text(), re.MULTILINE), (
            f"{script} does not know {option}"
        )


def minimum_python(root: Path) -> str:
    return re.search(r'python_requires=">=(\d+\.\d+)"', (root / "setup.py").read_text())[1]


def test_every_yaml_file_of_ours_parses(repo_root: Path):
    files = [*repo_root.glob(".*.y*ml"), *(repo_root / ".github").rglob("*.y*ml")]
    assert {".pre-commit-config.yaml", ".gitlab-ci.yml", "ci.yml", *FORMS} <= {file.name for file in files}
    assert all(isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict) for file in files)


def test_github_runs_what_everybody_runs(repo_root: Path):
    workflow = load(repo_root, ".github/workflows/ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    steps = workflow["jobs"]["cpu"]["steps"]
    assert "bash .ci/run" in [step.get("run") for step in steps]
    assert_our_command(repo_root, "bash .ci/run")
    (python,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert python == minimum_python(repo_root)
    assert workflow["permissions"] == {"contents": "read"}


def test_gitlab_runs_it_too(repo_root: Path):
    job = load(repo_root, ".gitlab-ci.yml")["cpu"]
    assert job["script"] == ["bash .ci/run"] and f":{minimum_python(repo_root)}-" in job["image"]
    assert all((repo_root / file).is_file() for file in job["cache"]["key"]["files"])


def test_pre_commit_calls_our_own_commands_and_fetches_nothing(repo_root: Path):
    config = load(repo_root, ".pre-commit-config.yaml")
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    for hook in hooks:
        assert hook["language"] == "system" and hook["pass_filenames"] is False and hook["name"]
        assert set(hook["stages"]) <= set(config["default_install_hook_types"])
        assert_our_command(repo_root, hook["entry"])
    assert len({hook["id"] for hook in hooks}) == len(hooks)


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_are_what_github_takes(repo_root: Path, name: str):
    form = load(repo_root, f".github/ISSUE_TEMPLATE/{name}")
    assert form["name"] and form["description"] and form["body"]
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes") and field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_editors_break_lines_where_ruff_does(repo_root: Path):
    ruff = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["ruff"]
    python = (repo_root / ".editorconfig").read_text().partition("[*.py]")[2].partition("[")[0]
    assert f"max_line_length = {ruff['line-length']}\n" in python and "indent_size = 4\n" in python
