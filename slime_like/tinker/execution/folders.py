"""Folders of weights: on a disk, or wherever fsspec reaches."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from pathlib import Path
from urllib.parse import quote

import fsspec
from fsspec.core import url_to_fs

from slime_like.errors import CheckpointError


class Folders:
    """What is below one path or URL. A folder is there whole, or not at all."""

    def __init__(self, root: str, staging: str | Path):
        """staging: a local folder, for what is written and for copies of what is elsewhere."""
        protocol, _, rest = root.rpartition("://")
        self.is_local = protocol in ("", "file")
        self.root = str(Path(rest).absolute()) if self.is_local else root.rstrip("/")
        # On the disk that it ends on, so that it gets its name by a rename.
        self._staging = Path(self.root, ".staging") if self.is_local else Path(staging).absolute()
        shutil.rmtree(self._staging, ignore_errors=True)  # what a process that was killed has left
        self._staging.mkdir(parents=True, exist_ok=True)

    def new(self) -> str:
        """A local folder to write to."""
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir()
        return str(folder)

    async def publish(self, folder: str, *names: str) -> tuple[str, int]:
        """Give a folder of `new` its name, whatever its parts are: where it is then, and its bytes."""
        return await asyncio.to_thread(self._publish, folder, [_safe(name) for name in names])

    def _publish(self, folder: str, names: list[str]) -> tuple[str, int]:
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        where = "/".join([self.root, *names])
        if not self.is_local:
            system, path = _system(where)
            if system.exists(path):
                system.rm(path, recursive=True)
            for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
                address = f"{path}/{file.relative_to(folder).as_posix()}"
                system.makedirs(address.rpartition("/")[0], exist_ok=True)
                system.put_file(str(file), address)
            shutil.rmtree(folder)
            return where, size
        target = Path(where)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # of a process that was killed before it wrote that it had this
            shutil.rmtree(target)
        os.rename(folder, target)
        _sync(target.parent)
        return where, size

    async def local(self, where: str) -> str:
        """A local folder with the same files: itself, or a copy that stays until `remove`.

        Raises CheckpointError where there is none.
        """
        return await asyncio.to_thread(self._local, where)

    def _local(self, where: str) -> str:
        if self.is_local:
            if not Path(where).is_dir():
                raise CheckpointError(f"{where} is not there any more.")
            return where
        copy = self._copy(where)
        if not copy.is_dir():
            system, path = _system(where)
            files = system.find(path) if system.exists(path) else []
            if not files:
                raise CheckpointError(f"{where} is not there any more.")
            part = Path(self.new())
            for file in files:
                target = part / file[len(path) :].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(target))
            os.rename(part, copy)
        return str(copy)

    async def remove(self, where: str) -> None:
        """Delete it; one that is not there is deleted."""
        await asyncio.to_thread(self._remove, where)

    def _remove(self, where: str) -> None:
        if self.is_local:
            shutil.rmtree(where, ignore_errors=True)
            return
        system, path = _system(where)
        if system.exists(path):
            system.rm(path, recursive=True)
        shutil.rmtree(self._copy(where), ignore_errors=True)

    async def remove_others(self, where: str) -> None:
        """Delete what is beside a folder: what was there before it, also of a process that was killed in between."""
        await asyncio.to_thread(self._remove_others, where)

    def _remove_others(self, where: str) -> None:
        parent, _, name = where.rpartition("/")
        if self.is_local:
            others = [path.name for path in Path(parent).iterdir() if path.name != name]
        else:
            system, path = _system(parent)
            listed = system.ls(path, detail=False) if system.exists(path) else []
            others = [other for entry in listed if (other := entry.rstrip("/").rpartition("/")[2]) != name]
        for other in others:
            self._remove(f"{parent}/{other}")

    def _copy(self, where: str) -> Path:
        return self._staging / quote(where, safe="")


def _system(where: str) -> tuple[fsspec.AbstractFileSystem, str]:
    system, path = url_to_fs(where)
    return system, path.rstrip("/")


def _safe(name: str) -> str:
    """One path component, another for every name."""
    quoted = quote(name, safe="=@")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
