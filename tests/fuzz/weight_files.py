"""safetensors files and folders of them, and checkpoints of ours, that are torn, hostile or wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from slime_like.megatron_backend.checkpoint.folder import STATE_FILE, TRACKER, Draft, damage, find
from slime_like.megatron_backend.checkpoint.reader import checked_copy
from slime_like.megatron_backend.hf.files import INDEX_NAME, HfReader
from tests.fuzz.cases import Case
from tests.unit.megatron_backend.checkpoint.test_reader import ASKED, make

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "..",
    "/etc/passwd",
    [],
    [1],
    {},
    {"a": 1},
)
WEIGHT = torch.arange(12.0).reshape(4, 3)


def safetensors_cases(scratch: Path) -> Iterator[Case]:
    """Headers, lengths, offsets, types and numbers; and indexes."""
    for name, data in _files():
        yield Case(f"model.safetensors {name}", _reads(scratch, {"model.safetensors": data}))
    good = save({"a": WEIGHT})
    for name, data in _indexes():
        yield Case(f"index {name}", _reads(scratch, {INDEX_NAME: data, "model-1.safetensors": good}))
    yield Case("no file", _reads(scratch, {}))


def _reads(scratch: Path, files: dict[str, bytes]) -> Callable[[], None]:
    def run() -> None:
        folder = scratch / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        reader = HfReader(str(folder))
        reader.dtype()
        reader.read("a", shape=(4, 3))
        reader.read("a", shape=(4, 3), dim=0, start=1, stop=2)

    return run


def _with_header(header: bytes, data: bytes = bytes(48), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _files() -> Iterator[tuple[str, bytes]]:
    good = save({"a": WEIGHT})
    entry = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}
    for place in range(0, len(good), 12):
        yield f"cut at {place}", good[:place]
    for key in entry:
        for value in VALUES:
            yield f"{key} = {value}", _with_header(json.dumps({"a": entry | {key: value}}).encode())
    for name, header, length in (
        ("deep", b"[" * 100_000, None), ("no JSON", b"\xff" * 40, None), ("list", b"[]", None),
        ("NUL", b"\0" * 8, None),
        ("length", b"{}", 2**63), ("length of all", b"{}", 50), ("largest length", b"{}", 2**64 - 1),
    ):  # fmt: skip
        yield name, _with_header(header, length=length)
    offsets = ([0, 2**63], [48, 0], [0, 47], [1, 49], [-1, 47], [0, 96])
    for pair in offsets:
        yield f"offsets {pair}", _with_header(json.dumps({"a": entry | {"data_offsets": pair}}).encode())
    for dtype in ("F8_E4M3", "I8", "BOOL", "I64", "U64", "Q4"):
        yield f"dtype {dtype}", _with_header(json.dumps({"a": entry | {"dtype": dtype}}).encode())
    for value in (float("nan"), float("inf"), -float("inf")):
        weight = WEIGHT.clone()
        weight[1, 1] = value
        yield f"a number {value}", save({"a": weight})


def _indexes() -> Iterator[tuple[str, bytes]]:
    for value in VALUES:
        yield f"= {value}", json.dumps(value).encode()
        yield f"weight_map = {value}", json.dumps({"weight_map": value}).encode()
        yield f"file = {value}", json.dumps({"weight_map": {"a": value}}).encode()
    yield "deep", b'{"weight_map":' * 50_000
    yield "no JSON", b"\xff"
    yield "other tensor", json.dumps({"weight_map": {"b": "model-1.safetensors"}}).encode()
    yield "a tensor that is not in it", json.dumps({"weight_map": {"a": "model-2.safetensors"}}).encode()


def checkpoint_cases(scratch: Path) -> Iterator[Case]:
    """Each file cut, emptied, of other bytes; each key of the record with each value; names of other folders."""
    names = ("metadata.json", "common.pt", ".metadata", "__0_0.distcp")
    harms: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"",
        "cut": lambda data: data[: len(data) // 2],
        "zeros": lambda data: bytes(len(data)),
        "flipped": lambda data: data[:9] + bytes([data[9] ^ 8]) + data[10:],
        "a pickle of an int": lambda data: pickle.dumps(3),
        "a pickle that calls": lambda data: b"cos\nsystem\n(S'true'\ntR.",
        "deep JSON": lambda data: b"[" * 100_000,
        "a pickle of a million lists": lambda data: b"(l" * 100_000 + b".",
    }
    for name in names:
        for what, harm in harms.items():
            for has_digests in (True, False):
                yield Case(f"{name} {what}, digests {has_digests}", _loads(scratch, name, harm, has_digests))
    for key in ("files", "digests", "digest", "num_rollouts_done", "client_state", "architecture", "layout", "lora"):
        for value in VALUES:
            yield Case(f"{STATE_FILE} {key} = {value}", _records(scratch, lambda r, k=key, v=value: r | {k: v}))
    for value in VALUES:
        yield Case(f"{STATE_FILE} = {value}", _records(scratch, lambda r, v=value: v))
    for text in ("", "-1", "x", "9" * 30, "٣", "../x", "release", "\0", "3\n3", "1e3"):
        yield Case(f"{TRACKER} {text!r}", _tracks(scratch, text))


def _checkpoint(scratch: Path) -> Path:
    root = scratch / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    draft = Draft(folder=str(root), number=3, record={"num_rollouts_done": 3, "layout": [1, 1, 1], "client_state": {}})
    draft.make()
    os.rmdir(draft.path)
    make(draft.path)
    draft.publish()
    return Path(draft.final_path)


def _loads(scratch: Path, name: str, harm: Callable[[bytes], bytes], has_digests: bool) -> Callable[[], None]:
    def run() -> None:
        path = _checkpoint(scratch)
        (path / name).write_bytes(harm((path / name).read_bytes()))
        if not has_digests:
            record = json.loads((path / STATE_FILE).read_text())
            sizes = {file: os.path.getsize(path / file) for file in record["files"]}
            (path / STATE_FILE).write_text(json.dumps({"num_rollouts_done": 3, "files": sizes}))
        _read(path)

    return run


def _records(scratch: Path, change: Callable[[dict], Any]) -> Callable[[], None]:
    def run() -> None:
        path = _checkpoint(scratch)
        record = json.loads((path / STATE_FILE).read_text())
        del record["digest"]  # the rest is to be looked at
        (path / STATE_FILE).write_text(json.dumps(change(record)))
        _read(path)

    return run


def _tracks(scratch: Path, text: str) -> Callable[[], None]:
    def run() -> None:
        path = _checkpoint(scratch)
        (path.parent / TRACKER).write_text(text)
        _read(path)

    return run


def _read(path: Path) -> None:
    chosen = find(str(path.parent))
    damage(chosen)
    with checked_copy(chosen, ASKED):
        pass
