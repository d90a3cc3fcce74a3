"""The folder in shared memory is ours alone, and stays for as long as anybody uses it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slime_like.sglang_backend import shared_memory
from slime_like.sglang_backend.shared_memory import drop_shared_directory, make_shared_directory, shared_directory


@pytest.fixture
def file_in_it() -> Iterator[str]:
    """A file in the folder, so that nobody else of this user, who may be testing too, drops it."""
    for _ in range(100):
        path = os.path.join(make_shared_directory(), f"test-{os.getpid()}")
        try:
            with open(path, "x"):
                break
        except FileNotFoundError:  # dropped between the two calls
            continue
    yield path
    os.unlink(path)
    drop_shared_directory()


def test_the_folder_is_the_users_and_readable_by_nobody_else(file_in_it: str):
    path = shared_directory()
    assert path == f"/dev/shm/slime-like-{os.getuid()}" == os.path.dirname(file_in_it)
    info = os.lstat(path)
    assert stat.S_ISDIR(info.st_mode) and stat.S_IMODE(info.st_mode) == 0o700 and info.st_uid == os.getuid()
    assert make_shared_directory() == path  # again, as every run of the user does


def test_a_folder_in_use_is_not_dropped(file_in_it: str):
    drop_shared_directory()
    assert os.path.exists(file_in_it)


def test_a_run_has_a_folder_of_its_own_by_a_name_that_nobody_can_guess(monkeypatch):
    names = set()
    for _ in range(2):
        monkeypatch.delenv(shared_memory.DIRECTORY_VARIABLE, raising=False)
        shared_memory.name_shared_directory()
        names.add(shared_directory())
        assert shared_memory.shared_environment() == {shared_memory.DIRECTORY_VARIABLE: shared_directory()}
    assert len(names) == 2
    assert all(re.fullmatch(rf"/dev/shm/slime-like-{os.getuid()}-[0-9a-f]{{16}}", name) for name in names)
    monkeypatch.setenv(shared_memory.DIRECTORY_VARIABLE, "/dev/shm/slime-like-0-x/../../etc")
    assert shared_directory() == f"/dev/shm/slime-like-{os.getuid()}"


def test_folders_of_runs_that_were_killed_whole_are_removed_and_those_in_use_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_ROOT", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folders = [tmp_path / f"slime-like-{os.getuid()}-{name}" for name in ("killed", "used", "new")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    (folders[0] / f"{dead.pid}-source-0-x").mkdir()
    (folders[1] / f"{os.getpid()}-source-0-x").mkdir()
    shared_memory.remove_dead_sources()
    assert list(folders[0].iterdir()) == []
    for folder in folders[:2]:
        os.utime(folder, (0, 0))
    shared_memory.tidy_shared_memory()
    assert [folder.exists() for folder in folders] == [False, True, True]


_SOURCE = """
import os, sys
from slime_like.sglang_backend import shared_memory as shared
shared._ROOT = sys.argv[1]
for _ in range(300):
    folder = shared.make_source_folder(f"{os.getpid()}-source-0-")
    os.rmdir(folder)
    shared.remove_dead_sources()
    shared.drop_shared_directory()
"""


def test_sources_that_come_and_go_at_once_do_not_fail_each_other(tmp_path):
    """Each may drop the folder between any two calls of another."""
    sources = [
        subprocess.Popen([sys.executable, "-c", _SOURCE, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [source.communicate(timeout=60)[1] for source in sources]
    assert said == [""] * 3 and not list(tmp_path.iterdir())
