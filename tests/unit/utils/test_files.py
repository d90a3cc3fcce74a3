"""Files are whole or absent, and no run overwrites another."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading

import pytest

from slime_like.config.observability import ObservabilityConfig
from slime_like.config.run import RunConfig
from slime_like.errors import UserError
from slime_like.utils.files import RunDirectory, append_json_line, read_json_lines, write_atomic


def config(**options) -> RunConfig:
    return dataclasses.replace(RunConfig(), observability=ObservabilityConfig(**options))


def test_write_atomic_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["b.txt"]
    assert path.stat().st_mode & 0o077 == 0o066 & ~_umask()  # not only for its owner


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "b.txt"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 5)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["b.txt"]


def test_json_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in range(3):
        append_json_line(path, {"step": step, "text": "ü\n"})
    with open(path, "a") as file:
        file.write('{"step": 3, "te')  # a write cut short
    assert [record["step"] for record in read_json_lines(path)] == [0, 1, 2]
    with pytest.raises(ValueError):
        append_json_line(path, {"x": math.nan})


def test_lines_of_several_writers_do_not_mix(tmp_path):
    path = tmp_path / "m.jsonl"
    threads = [
        threading.Thread(target=lambda k=k: [append_json_line(path, {"k": k, "pad": "x" * 5000}) for _ in range(30)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["k"] for record in read_json_lines(path)) == sorted(list(range(4)) * 30)


def test_the_layout_of_a_run_directory(tmp_path):
    run = RunDirectory.create(config(run_name="quick"), root=str(tmp_path / "runs"))
    assert run.path.startswith(str(tmp_path / "runs")) and run.path.endswith("-quick") and os.path.isabs(run.path)
    assert json.loads(run.config.read_text())["observability"]["run_name"] == "quick"
    assert sorted(os.listdir(run.path)) == ["checkpoints", "config.json", "logs", "samples"]
    assert run.log("actor", 3) == run.logs / "actor-3.log"
    assert (run.plan.name, run.metrics.name) == ("plan.json", "metrics.jsonl")


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path):
    paths = {RunDirectory.create(config(), root=str(tmp_path)).path for _ in range(5)}
    assert len(paths) == 5


def test_a_named_directory_is_used_but_never_twice(tmp_path):
    path = tmp_path / "mine"
    path.mkdir()
    (path / "notes.txt").write_text("kept")
    run = RunDirectory.create(config(run_dir=str(path)))
    assert run.path == str(path)
    before = run.config.read_text()
    with pytest.raises(UserError, match=r"--run-dir .*mine: holds another run \(config.json\)"):
        RunDirectory.create(config(run_dir=str(path), run_name="other"))
    assert run.config.read_text() == before and (path / "notes.txt").read_text() == "kept"


def test_paths_that_cannot_be_a_run_directory_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(config(run_dir=str(tmp_path / "file")))
    with pytest.raises(UserError, match="cannot be made: Not a directory"):
        RunDirectory.create(config(run_dir=str(tmp_path / "file" / "run")))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
