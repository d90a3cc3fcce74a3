"""Wheels as files: leave parts of them out with a true RECORD, and cut all of them into parts of one size, with
digests.
"""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import io
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BLOCK_BYTES = 1 << 20
PART_NAME = "wheels.tar.part-{:03d}"


@dataclass(frozen=True)
class Strip:
    """Files of one package that are left out.

    files: patterns of paths inside the wheel; why: what is lost and what to use instead.
    """

    package: str
    files: tuple[str, ...]
    why: str


#: Nothing here is imported unless it is asked for by name: see docs/air-gapped.md.
STRIPS = (
    Strip(
        "sglang-kernel",
        ("sgl_kernel/flash_ops*.so",),
        "FlashAttention 3. Loaded only by --sglang-attention-backend fa3 (SGLang's choice on Hopper): pass flashinfer"
        " or triton instead.",
    ),
    Strip(
        "ray",
        ("ray/jars/*.jar", "ray/dashboard/client/build/*.map"),
        "Java workers, and the debugging maps of the dashboard's page.",
    ),
)


def file_digest(path: Path) -> str:
    """sha256 of a file, lower-case hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def strip_wheel(source: Path, target: Path, patterns: tuple[str, ...]) -> list[dict]:
    """Write a copy of the wheel without the files that a pattern names; its RECORD lists exactly what it holds.

    Returns the files left out, as {"file", "bytes"}; writes nothing if there are none. Kept files keep their bytes,
    mode and time.
    """
    with zipfile.ZipFile(source) as wheel:
        entries = wheel.infolist()
        dropped = [e for e in entries if any(fnmatch.fnmatchcase(e.filename, pattern) for pattern in patterns)]
        if not dropped:
            return []
        names = {e.filename for e in dropped}
        (record,) = [e for e in entries if e.filename.endswith(".dist-info/RECORD") and e.filename.count("/") == 1]
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
            rows = [
                _copy_entry(wheel, out, e)
                for e in entries
                if e.filename not in names and e.filename != record.filename and not e.is_dir()
            ]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
            out.writestr(record, text.getvalue(), zipfile.ZIP_DEFLATED)
    return [{"file": e.filename, "bytes": e.file_size} for e in dropped]


def _copy_entry(wheel: zipfile.ZipFile, out: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[str, str, int]:
    """Copy one file; returns its line of RECORD."""
    digest, copy = hashlib.sha256(), zipfile.ZipInfo(entry.filename, entry.date_time)
    copy.external_attr, copy.compress_type = entry.external_attr, entry.compress_type
    with wheel.open(entry) as read, out.open(copy, "w", force_zip64=entry.file_size >= 1 << 31) as write:
        while block := read.read(BLOCK_BYTES):
            digest.update(block)
            write.write(block)
    return entry.filename, "sha256=" + base64.urlsafe_b64encode(digest.digest()).decode().rstrip("="), entry.file_size


def installed_bytes(wheel: Path) -> int:
    """What the wheel takes when it is unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def top_level(wheel: Path) -> list[str]:
    """The packages and modules that can be imported after installing the wheel, without private ones and folders of
    libraries.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
    tops = {
        name.split("/")[0].removesuffix(".py")
        for name in names
        if name.count("/") == 0 or name.count("/") == 1 and name.endswith("/__init__.py")
    }
    return sorted(name for name in tops if name.isidentifier() and not name.startswith("_"))


class PartWriter:
    """A file that is cut into parts of at most `split_bytes`.

    `parts` has {"name", "bytes", "sha256"} of each after `close`.
    """

    def __init__(self, folder: Path, split_bytes: int):
        self.folder, self.split_bytes = folder, split_bytes
        self.parts: list[dict] = []
        self._file: IO[bytes] | None = None
        self._written, self._digest = 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Append the bytes, opening new parts as they fill up."""
        view = memoryview(data)
        while view:
            if self._file is None:
                self._file = open(self.folder / PART_NAME.format(len(self.parts)), "wb")
                self._written, self._digest = 0, hashlib.sha256()
            piece = view[: self.split_bytes - self._written]
            self._file.write(piece)
            self._digest.update(piece)
            self._written += len(piece)
            view = view[len(piece) :]
            if self._written == self.split_bytes:
                self.close()
        return len(data)

    def close(self) -> None:
        """End the part that is open, if one is."""
        if self._file is not None:
            self._file.close()
            self.parts.append(
                {"name": PART_NAME.format(len(self.parts)), "bytes": self._written, "sha256": self._digest.hexdigest()}
            )
            self._file = None


def write_parts(wheels: list[Path], folder: Path, split_bytes: int) -> list[dict]:
    """One tar of the wheels, cut into parts: `cat wheels.tar.part-* | tar x` joins them without this program.

    Same input, same bytes.
    """
    writer = PartWriter(folder, split_bytes)
    with tarfile.open(mode="w|", fileobj=writer, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]  # only write() is used
        for path in wheels:
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = path.stat().st_size, 0o644
            with open(path, "rb") as file:
                archive.addfile(info, file)
    writer.close()
    return writer.parts
