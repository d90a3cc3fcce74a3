"""Files that are whole or absent, and the layout of a run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slime_like.errors import UserError

#: The folder that holds the package, for the PYTHONPATH of processes that we start.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    with written_beside(path, content):
        pass


@contextlib.contextmanager
def written_beside(path: str | os.PathLike, content: str | bytes) -> Iterator[None]:
    """As write_atomic, in two steps: what needs room on the disk is done when the block begins, and the file takes its
    place when it ends without an error.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        give_usual_mode(temporary)
        yield
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def keep_files_private(*, share: bool = False) -> None:
    """From now on, files and folders of this process and its children are ours alone: 0600 and 0700.

    By the umask, since libraries make most of them. share: leave the umask that we were started with.
    """
    if not share:
        os.umask(0o077)


def keep_files_like(folder: str | os.PathLike) -> None:
    """As keep_files_private, in a process that joins a run: its files are for those whom the run lets into `folder`.

    One that is not there (on another machine) is made, for us alone.
    """
    with contextlib.suppress(FileNotFoundError):
        os.umask(0o777 & ~stat.S_IMODE(os.stat(folder).st_mode) & 0o077)
        return
    keep_files_private()
    os.makedirs(folder, exist_ok=True)


def give_usual_mode(path: str | os.PathLike) -> None:
    """The mode that open() would have given a file: what mkstemp makes (safetensors too) is its owner's whatever the
    umask is.
    """
    os.chmod(path, 0o666 & ~_umask())


def private_folder(path: str | os.PathLike, *, share: bool = False) -> None:
    """A folder that is there and ours alone, also if it was there before. share: as it is, or as the umask has it."""
    os.makedirs(path, exist_ok=True)
    if not share and os.stat(path).st_uid == os.getuid():
        os.chmod(path, 0o700)


def append_text(path: str | os.PathLike, text: str) -> None:
    """Add text to a file's end, whole or not at all: what a full disk took of it is cut off again. For one writer."""
    rest = memoryview(text.encode())
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def append_json_line(path: str | os.PathLike, record: dict) -> None:
    """Add one JSON object as a line, whole or not at all.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    append_text(path, json.dumps(record, allow_nan=False) + "\n")


def read_json_lines(path: str | os.PathLike) -> list[dict]:
    """The objects of a JSONL file. A last line without its newline is a write cut short, and is left out."""
    text = Path(path).read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines() if line.strip()]


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Where everything of one run lies. Example: RunDirectory("runs/20250101-120000-train").metrics"""

    path: str

    @classmethod
    def create(cls, config, *, root: str = "runs", goes_on: bool = False) -> RunDirectory:
        """Make the directory of a run and write config.json into it.

        config: the RunConfig (its type is of a higher layer). Default path: {root}/<time>-<run name>.
        Raises UserError if --run-dir already holds a run, which is never overwritten; goes_on: it is this one.
        """
        options = config.observability
        if options.run_dir:
            path = Path(options.run_dir)
            if path.exists() and not path.is_dir():
                raise UserError(f"--run-dir {path}: is a file. Fix: another --run-dir.")
            for name in ("config.json", "metrics.jsonl"):
                if (path / name).exists() and not goes_on:
                    raise UserError(
                        f"--run-dir {path}: holds another run ({name}). Fix: another --run-dir, or none for"
                        " runs/<time>-<name>; --resume auto goes on with it."
                    )
            path = _make(path, exist_ok=True)
        else:
            path = _make_new(Path(root) / f"{time.strftime('%Y%m%d-%H%M%S')}-{options.run_name}")
        run = cls(str(path.resolve()))
        try:
            for folder in (run.samples, run.checkpoints, run.logs):
                folder.mkdir(exist_ok=True)
            write_atomic(run.config, config.to_json() + "\n")
        except OSError as error:
            raise UserError(
                f"the run directory {path} cannot be written: {error.strerror}. Fix: room there, or another --run-dir."
            ) from None
        return run

    @property
    def config(self) -> Path:
        """The resolved config."""
        return Path(self.path) / "config.json"

    @property
    def plan(self) -> Path:
        """The placement plan."""
        return Path(self.path) / "plan.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return Path(self.path) / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """The phases of the run in Chrome's trace format."""
        return Path(self.path) / "trace.json"

    @property
    def reward_curve(self) -> Path:
        """The picture drawn from the metrics."""
        return Path(self.path) / "reward.png"

    @property
    def dropped(self) -> Path:
        """Prompts that were drawn and not trained on, one JSON object a line; there once there is one."""
        return Path(self.path) / "dropped.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of samples that were asked for."""
        return Path(self.path) / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return Path(self.path) / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return Path(self.path) / "tensorboard"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return Path(self.path) / "logs"

    def log(self, role: str, rank: int) -> Path:
        """The log file of one process, e.g. logs/actor-0.log."""
        return self.logs / f"{role}-{rank}.log"


def _make(path: Path, *, exist_ok: bool) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(f"the run directory {path} cannot be made: {error.strerror}. Fix: --run-dir.") from None
    return path


def _make_new(path: Path) -> Path:
    """`path`, or path-2, path-3 … if runs started within the same second."""
    for attempt in itertools.count(1):
        try:
            return _make(path if attempt == 1 else path.with_name(f"{path.name}-{attempt}"), exist_ok=False)
        except FileExistsError:
            continue
    raise AssertionError("unreachable: count() does not end")


def _umask() -> int:
    """This process's umask, read without changing it: other threads are making files meanwhile."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
