"""One complete version as a folder: safetensors shards, their index, and manifest.json with every tensor's digest."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from slime_like.weight_sync.delta.codec import DeltaError, digest
from slime_like.weight_sync.delta.frame import TensorKey, source_digest

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One safetensors file. start: where its first tensor begins."""

    file: str
    start: int
    tensors: tuple[tuple[TensorKey, bytes], ...]  # with the digest of each

    def places(self) -> Iterator[tuple[TensorKey, bytes, int]]:
        """(tensor, digest, first byte in the file)."""
        at = self.start
        for key, after in self.tensors:
            yield key, after, at
            at += key.num_bytes


ShardFiles = dict[tuple[int, int], ShardFile]  # by (source, number)


@dataclasses.dataclass(frozen=True)
class Version:
    """A complete version. sources: digest of each source's share."""

    folder: str
    sequence: int
    version: int
    sources: dict[int, str]
    shards: ShardFiles


def safetensors_header(keys: list[TensorKey]) -> bytes:
    """The beginning of a safetensors file whose tensors follow in this order (huggingface/safetensors, README
    "Format").
    """
    entries: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for key in keys:
        entries[key.name] = {"dtype": key.dtype, "shape": list(key.shape), "data_offsets": [at, at + key.num_bytes]}
        at += key.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_index(folder: str, shards: Iterable[ShardFile]) -> None:
    """Which shard each tensor is in, as transformers and SGLang read it. Raises DeltaError for a tensor in two."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        for key, _ in shard.tensors:
            if key.name in weight_map:
                raise DeltaError(f"{key.name} was sent twice: {weight_map[key.name]} and {shard.file}")
            weight_map[key.name] = shard.file
            total += key.num_bytes
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=1)


def write_manifest(folder: str, version: Version) -> None:
    """Put a version's manifest into a folder, which may not have its final name yet."""
    with open(os.path.join(folder, "manifest.json"), "w") as file:
        json.dump(_to_json(version), file)


def _to_json(version: Version) -> dict:
    return {
        "format": _FORMAT,
        "sequence": version.sequence,
        "version": version.version,
        "sources": {str(source): value for source, value in version.sources.items()},
        "shards": [
            {
                "source": source,
                "shard": number,
                "file": shard.file,
                "start": shard.start,
                "tensors": [[key.name, key.dtype, list(key.shape), after.hex()] for key, after in shard.tensors],
            }
            for (source, number), shard in sorted(version.shards.items())
        ],
    }


def read_version(folder: str) -> Version:
    """What the manifest of a folder says. Raises OSError, or ValueError, KeyError or TypeError if it is damaged."""
    with open(os.path.join(folder, "manifest.json")) as file:
        data = json.load(file)
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']}, known is {_FORMAT}")
    shards = {
        (entry["source"], entry["shard"]): ShardFile(
            os.path.basename(entry["file"]),
            entry["start"],
            tuple(
                (TensorKey(name, dtype, tuple(shape)), bytes.fromhex(after))
                for name, dtype, shape, after in entry["tensors"]
            ),
        )
        for entry in data["shards"]
    }
    return Version(folder, data["sequence"], data["version"], {int(k): v for k, v in data["sources"].items()}, shards)


def check_version(version: Version) -> None:
    """Read every tensor. Raises DeltaError naming the first whose digest is wrong, OSError for a missing file."""
    for shard in version.shards.values():
        path = os.path.join(version.folder, shard.file)
        size = shard.start + sum(key.num_bytes for key, _ in shard.tensors)
        if os.path.getsize(path) != size:
            raise DeltaError(f"{path} has {os.path.getsize(path)} bytes, it must have {size}")
        if size == 0:
            continue
        data = np.memmap(path, dtype=np.uint8, mode="r")
        for key, after, at in shard.places():
            actual = digest(data[at : at + key.num_bytes])
            if actual != after:
                raise DeltaError(f"{path}, {key.name}: its digest is {actual.hex()}, it must be {after.hex()}")
    for source, expected in version.sources.items():
        mine = sorted((number, shard.tensors) for (of, number), shard in version.shards.items() if of == source)
        if source_digest(mine) != expected:
            raise DeltaError(f"the digest of source {source} is not that of its tensors")
