"""Files are whole or absent, and no run overwrites another."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import subprocess
import sys
import threading

import pytest

from slime_like.config.observability import ObservabilityConfig
from slime_like.config.run import RunConfig
from slime_like.errors import UserError
from slime_like.utils import files
from slime_like.utils.files import RunDirectory, append_json_line, private_folder, read_json_lines, write_atomic


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


#: What a run writes, by every way that it is written in; the arguments are the run directory and --share-run-dir.
WRITER = """
import dataclasses, os, sys, tempfile
from pathlib import Path
import torch
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.run import RunConfig
from slime_like.megatron_backend.hf.files import save_stage
from slime_like.observability.metrics import MetricsLog
from slime_like.utils.files import RunDirectory, append_json_line, keep_files_like, keep_files_private, write_atomic
os.umask(0o022)
share = sys.argv[2] == "share"
keep_files_private(share=share)
config = dataclasses.replace(RunConfig(), observability=ObservabilityConfig(run_dir=sys.argv[1], share_run_dir=share))
run = RunDirectory.create(config)
append_json_line(run.dropped, {"a": 1})
with MetricsLog(run, tensorboard=True) as log:
    log.log("train", 0, {"train/loss": 1.0})
torch.save({"a": 1}, run.checkpoints / "common.pt")
save_stage([("a", torch.ones(2))], str(run.checkpoints), "model")
pid = os.fork()
if pid == 0:  # a rank of the run, on a cluster that was started with an umask of its own
    os.umask(0o000)
    keep_files_like(run.logs)
    os.makedirs(run.checkpoints / "iter_1" / "inner")
    (run.logs / "actor-0.log").write_text("x")
    write_atomic(run.checkpoints / "iter_1" / "client_state.json", "{}")
    keep_files_like(run.logs / "not" / "there")
    (run.logs / "not" / "there" / "x").write_text("x")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["private", "share"])
def test_nobody_else_reads_a_run_directory_unless_it_is_shared(tmp_path, how):
    path = tmp_path / "run"
    subprocess.run([sys.executable, "-c", WRITER, str(path), how], check=True, timeout=120)
    modes = {
        os.path.relpath(os.path.join(folder, name), tmp_path): stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode)
        for folder, folders, files in os.walk(tmp_path)
        for name in (*folders, *files)
    }
    assert len(modes) >= 14 and "run/metrics.jsonl" in modes and any("tfevents" in name for name in modes)
    alone = {name for name, mode in modes.items() if not mode & 0o077}
    if how == "private":
        assert alone == set(modes)
    else:  # but for what is made where no folder of the run is seen
        assert alone == {"run/logs/not", "run/logs/not/there", "run/logs/not/there/x"}


def test_a_folder_that_was_open_is_closed(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    private_folder(folder, share=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_umask_is_read_without_being_changed():
    before = os.umask(0o027)
    try:
        assert files._umask() == 0o027 == os.umask(0o027)
    finally:
        os.umask(before)
