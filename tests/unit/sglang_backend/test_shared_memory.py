"""The folder in shared memory is ours alone, and stays for as long as anybody uses it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest

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
