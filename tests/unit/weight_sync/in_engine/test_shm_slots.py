"""Tensors in a file of shared memory: found by their table, read only where the launcher said, and never beyond the
file.
"""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch

from slime_like.sglang_backend import shared_memory
from slime_like.weight_sync.in_engine.shm_slots import (
    DIRECTORY_VARIABLE,
    SharedFile,
    _mapped,
    checked_path,
    tensors,
    views,
)

MEMORY = torch.arange(16, dtype=torch.uint8)


def take(path, start: int, stop: int) -> list[tuple]:
    """What an engine reads of a bucket, for as long as nobody changes it."""
    with tensors(str(path), start, stop, os.path.dirname(path)) as pairs:
        return list(pairs)


def test_the_variable_is_the_launchers():
    assert DIRECTORY_VARIABLE == shared_memory.DIRECTORY_VARIABLE


def test_views_by_their_table():
    table = [["a", "uint8", [2, 2], 0, 4], ["b", "int32", [1], 4, 8], ["none", "float32", [0], 8, 8]]
    tensors = dict(views(MEMORY, table, 8))
    assert tensors["a"].tolist() == [[0, 1], [2, 3]] and tensors["none"].shape == (0,)
    assert tensors["b"].tolist() == [4 + 5 * 2**8 + 6 * 2**16 + 7 * 2**24]


@pytest.mark.parametrize(("first", "last"), [(-1, 4), (4, 2), (0, 9)])
def test_a_table_that_lies_is_refused(first: int, last: int):
    with pytest.raises(ValueError, match=f"a at {first} to {last}, before a table at 8"):
        list(views(MEMORY, [["a", "uint8", [4], first, last]], 8))


def test_a_file_is_ours_alone_grows_and_goes(tmp_path):
    path = str(tmp_path / "bucket")
    file = SharedFile(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    mapping = file.resize(4)
    mapping[:4] = bytes([1, 2, 3, 4])
    mapping.close()
    table = json.dumps([["a", "uint8", [4], 0, 4]]).encode()
    mapping = file.resize(4 + len(table))
    mapping[4:] = table
    assert mapping[:4] == bytes([1, 2, 3, 4])
    ((name, tensor),) = take(path, 4, 4 + len(table))
    assert name == "a" and tensor.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="a table at 4 to 9999"):
        take(path, 4, 9999)
    file.close()
    file.close()
    assert not os.path.exists(path)


def test_only_plain_files_below_the_folder_are_read(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "bucket").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert checked_path(str(folder / "bucket"), str(folder)) == str(folder / "bucket")
    for path, message in (
        (tmp_path / "secret", "is outside of"),
        (folder / "link", "is outside of"),
        (folder, "no plain file"),
        (folder / ".." / "secret", "outside"),
    ):
        with pytest.raises(PermissionError, match=message):
            checked_path(str(path), str(folder))
    with pytest.raises(PermissionError, match=f"{DIRECTORY_VARIABLE} is not set"):
        checked_path(str(folder / "bucket"), None)


def test_a_bucket_whose_table_lies_is_refused(tmp_path):
    def refused(table: list, start: int, length: int) -> bool:
        path = tmp_path / f"{start}-{length}-{len(table)}"
        path.write_bytes(bytes(8) + json.dumps(table).encode())
        try:
            take(path, start, start + length)
        except ValueError:
            return True
        return False

    good = [["a", "float32", [2], 0, 8]]
    assert not refused(good, 8, len(json.dumps(good)))
    assert refused(good, 8, 10_000)
    reaching = [["a", "float32", [3], 0, 12]]
    assert refused(reaching, 8, len(json.dumps(reaching)))


def test_an_engine_forgets_files_that_are_gone(tmp_path):
    path = tmp_path / "slot"
    path.write_bytes(bytes(4) + b"[]")
    take(path, 4, 6)
    assert str(path) in _mapped
    path.unlink()
    path.with_name("other").write_bytes(b"[]")
    take(path.with_name("other"), 0, 2)
    assert str(path) not in _mapped


def test_a_table_names_another_file_and_only_one_of_the_folder(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "weights").write_bytes(torch.arange(4.0).numpy().tobytes())
    (tmp_path / "weights").write_bytes(bytes(16))

    def bucket(path: str, stop: int) -> tuple:
        table = json.dumps([["a", "float32", [1], 0, 4], ["b", "float32", [3], 4, stop, path]]).encode()
        (folder / "bucket").write_bytes(bytes(4) + table)
        return folder / "bucket", 4, 4 + len(table)

    (_, own), (_, mapped) = take(*bucket(str(folder / "weights"), 16))
    assert own.tolist() == [0] and mapped.tolist() == [1, 2, 3]
    mapped += 1  # by a loader after the request, say
    assert (folder / "weights").read_bytes() == torch.arange(4.0).numpy().tobytes()
    with pytest.raises(PermissionError, match="outside"):
        take(*bucket(str(tmp_path / "weights"), 16))
    with pytest.raises(ValueError, match="b at 4 to 20"):
        take(*bucket(str(folder / "weights"), 20))
