"""docs/walks.md names functions that exist, each used by another hop of its walk."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)
#: Who calls the phases: it orders them and hands on nothing of its own.
DRIVER = "loops/sync_loop.py"


def walks(text: str) -> dict[str, list[tuple[int, str, str]]]:
    """Heading -> (number, file, function) of each hop."""
    sections = [section for section in text.split("\n## ")[1:] if ROW.search(section)]
    return {
        section.splitlines()[0]: [(int(number), file, name) for number, file, name in ROW.findall(section)]
        for section in sections
    }


def defines(source: str, name: str) -> bool:
    """Whether a module has this function, or this class with this method."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for class_name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name), [])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) and node.name == function for node in body)


def uses(source: str, name: str) -> bool:
    """Whether a module uses this function, or for one that makes an object callable its class."""
    *classes, function = name.split(".")
    wanted = classes[-1] if function == "__call__" else function
    return any(
        (isinstance(node, ast.Attribute) and node.attr == wanted) or (isinstance(node, ast.Name) and node.id == wanted)
        for node in ast.walk(ast.parse(source))
    )


def problems(text: str, package: Path) -> list[str]:
    """What a page of walks says that is not so."""
    wrong = []
    for walk, hops in walks(text).items():
        if [number for number, *_ in hops] != list(range(1, len(hops) + 1)):
            wrong.append(f"{walk}: hops are not numbered from 1")
        for number, file, name in hops:
            if not (package / file).is_file() or not defines((package / file).read_text(), name):
                wrong.append(f"{walk}, {number}: {file} has no {name}")
            others = {DRIVER, *(other for _, other, _ in hops if other != file)}
            if not any((package / other).is_file() and uses((package / other).read_text(), name) for other in others):
                wrong.append(f"{walk}, {number}: no other hop uses {name}")
    return wrong


def test_both_walks_can_be_followed(repo_root: Path):
    text = (repo_root / "docs/walks.md").read_text()
    assert list(walks(text)) == ["From a prompt to its gradient", "From a weight to an engine"]
    assert problems(text, repo_root / "slime_like") == []
    mentioned = re.findall(r"`([\w/]+\.py)`", text)
    assert len(mentioned) > 26
    folders = ("slime_like", "slime_like/megatron_backend", "slime_like/weight_sync", "")
    assert [file for file in mentioned if not any((repo_root / f / file).is_file() for f in folders)] == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| 2 | `a.py` | `Feed.pull` | x |", "a.py has no Feed.pull"),
        ("| 2 | `b.py` | `Feed.draw` | x |", "b.py has no Feed.draw"),
        ("| 2 | `gone.py` | `draw` | x |", "gone.py has no draw"),
        ("| 2 | `a.py` | `Feed.idle` | x |", "no other hop uses Feed.idle"),
        ("| 3 | `a.py` | `Feed.draw` | x |", "not numbered"),
    ],
)
def test_what_is_not_so_is_seen(tmp_path: Path, row: str, problem: str):
    (tmp_path / "loops").mkdir()
    (tmp_path / DRIVER).write_text("go(1)\n")
    (tmp_path / "a.py").write_text("class Feed:\n    def draw(self): ...\n    def idle(self): ...\n")
    (tmp_path / "b.py").write_text("def go(feed):\n    return feed.draw()\n")
    page = "# Walks\n\n## One\n\n| 1 | `b.py` | `go` | x |\n"
    assert problems(page + "| 2 | `a.py` | `Feed.draw` | x |\n", tmp_path) == []
    assert any(problem in text for text in problems(page + row + "\n", tmp_path))
