"""Folders on a disk and in a file system of fsspec are there whole, or not at all."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from slime_like.errors import CheckpointError
from slime_like.tinker.execution.folders import Folders


@pytest.fixture(params=["path", "file", "memory"])
def root(request, tmp_path: Path) -> str:
    return {
        "path": str(tmp_path / "root"),
        "file": f"file://{tmp_path / 'root'}",
        "memory": f"memory://{uuid.uuid4().hex}",
    }[request.param]


def write(folder: str, text: str) -> str:
    Path(folder, "below").mkdir()
    Path(folder, "a.txt").write_text(text)
    Path(folder, "below", "b.txt").write_text(text)
    return folder


def test_what_was_published_comes_back(root: str, tmp_path: Path):
    async def run() -> None:
        folders = Folders(root, tmp_path / "staging")
        where, size = await folders.publish(write(folders.new(), "12345"), "s1:train:0", "snapshot-3")
        assert size == 10
        for home in (folders, Folders(root, tmp_path / "other")):  # another process, with nothing of its own
            local = Path(await home.local(where))
            assert (local / "a.txt").read_text() == (local / "below" / "b.txt").read_text() == "12345"
        # Again, as after a kill before anyone knew of it.
        again, _ = await folders.publish(write(folders.new(), "67"), "s1:train:0", "snapshot-3")
        fresh = Folders(root, tmp_path / "third")
        assert again == where and (Path(await fresh.local(where)) / "a.txt").read_text() == "67"
        await fresh.remove(where)
        await fresh.remove(where)
        with pytest.raises(CheckpointError, match="is not there any more"):
            await fresh.local(where)

    asyncio.run(run())


def test_others_are_what_is_beside_it(root: str, tmp_path: Path):
    async def run() -> None:
        folders = Folders(root, tmp_path / "staging")
        names = [("m", "snapshot-1"), ("m", "snapshot-2"), ("n", "snapshot-1")]
        old, new, other = [(await folders.publish(write(folders.new(), "x"), *name))[0] for name in names]
        await folders.remove_others(new)
        await folders.local(new)
        await folders.local(other)
        with pytest.raises(CheckpointError):
            await folders.local(old)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["..", ".", "a/../../b", "/etc"])
def test_a_name_stays_below(tmp_path: Path, name: str):
    async def run() -> str:
        folders = Folders(str(tmp_path / "root"), tmp_path / "staging")
        return (await folders.publish(write(folders.new(), "x"), "weights", name))[0]

    assert Path(asyncio.run(run())).resolve().parent == tmp_path / "root" / "weights"


def test_what_a_killed_process_was_writing_is_gone(tmp_path: Path):
    folders = Folders(str(tmp_path / "root"), tmp_path / "staging")
    half = Path(write(folders.new(), "half"))
    Folders(str(tmp_path / "root"), tmp_path / "staging")
    assert not half.exists()
