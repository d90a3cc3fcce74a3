"""A checkpoint's own copy of everything in it that Python would execute: read with an allow-list, checked, and written
anew where only we can write.

Megatron and torch (0.16.1, 2.13) unpickle three things in a checkpoint folder without asking what is in them:

    .metadata              torch's FileSystemReader.read_metadata: pickle.load
    objects in .distcp     torch's DefaultLoadPlanner.load_bytes: torch.load(weights_only=False); random and extra state
    common.pt              torch.load with its default, which TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD turns around

and metadata.json chooses the code that reads them. A pickle can name any function and call it, so a folder from
somebody else was as good as a program of theirs. Here each of them is read once, under an allow-list. What Megatron
then loads from is our folder, with an index built of the names and numbers only; a file that is exchanged meanwhile
changes nothing. Tensors stay where they are: torch reads them with weights_only=True.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from numpy._core.multiarray import _reconstruct
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_like.errors import CheckpointError

#: The only format that we write, and read.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: What an index may name, data types aside: records without behaviour, and torch's look-up of a layout by its name.
_INDEX_GLOBALS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")
    ),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
#: What an object may name beyond tensors and plain values: numpy's random state is an array of 32-bit numbers.
_OBJECT_GLOBALS = [np.ndarray, np.dtype, _reconstruct, type(np.dtype(np.uint32))]
#: Our file of objects, beside the index.
_OBJECTS = "objects.bin"
_FIX = (
    "Nothing of it was executed. Fix: load checkpoints of your own runs only, or get the weights as an HF folder"
    " (safetensors)."
)


@contextlib.contextmanager
def checked_copy(path: str, sharded: dict) -> Iterator[str]:
    """A private folder from which Megatron loads `sharded` as from `path`; removed afterwards.

    Raises CheckpointError naming file and global.
    sharded: the state dict to be filled; of the objects in the checkpoint only those that it asks for are looked at.
    """
    folder = tempfile.mkdtemp(prefix="slime-like-checkpoint-")
    try:
        _check_format(os.path.join(path, "metadata.json"))
        with open(os.path.join(folder, "metadata.json"), "w", encoding="utf-8") as file:
            json.dump(_FORMAT, file)
        common = os.path.join(path, "common.pt")
        torch.save(_load(io.BytesIO(_read(common)), common), os.path.join(folder, "common.pt"))
        object_names = {leaf.unique_key for leaf in nested_values(sharded) if isinstance(leaf, ShardedObject)}
        with (
            open(os.path.join(folder, ".metadata"), "wb") as file,
            open(os.path.join(folder, _OBJECTS), "wb") as objects,
        ):
            pickle.dump(_copy_index(path, _read_index(os.path.join(path, ".metadata")), object_names, objects), file)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _IndexUnpickler(pickle.Unpickler):
    """Finds nothing but _INDEX_GLOBALS and torch's data types; a pickle can do nothing without finding."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_GLOBALS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise _ForbiddenGlobalError(f"{module}.{name}")


class _ForbiddenGlobalError(Exception):
    pass


def _read_index(path: str) -> Metadata:
    data = _read(path)
    try:
        index = _IndexUnpickler(io.BytesIO(data)).load()
    except _ForbiddenGlobalError as error:
        raise CheckpointError(
            f"{path} asks for {error}, which no index of a checkpoint needs: loading it would execute a program. {_FIX}"
        ) from None
    except Exception as error:  # noqa: BLE001 bytes that are no pickle end in nearly any exception
        raise CheckpointError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from None
    if type(index) is not Metadata:
        raise CheckpointError(f"{path} is no index of a checkpoint: it holds a {type(index).__name__}.")
    return index


def _copy_index(path: str, index: Metadata, object_names: set[str], objects: io.BufferedWriter) -> Metadata:
    """The same places of the same tensors, made of checked names and numbers.

    What objects were asked for is copied into `objects`, others are left out.
    """
    index_path = os.path.join(path, ".metadata")
    try:
        entries = {
            name: entry
            for name, entry in index.state_dict_metadata.items()
            if type(entry) is not BytesStorageMetadata or name in object_names
        }
        tensors = {_is(name, str): _entry(entry) for name, entry in entries.items()}
        places = {}
        for place, info in index.storage_data.items():
            name = _is(_is(place, MetadataIndex).fqn, str)
            if name not in tensors:
                continue
            storage = _storage(path, _is(info, _StorageInfo))
            if type(tensors[name]) is BytesStorageMetadata:
                storage = _copy_object(name, storage, objects)
            offset = None if place.offset is None else _sizes(place.offset)
            places[MetadataIndex(name, offset, None if place.index is None else _is(place.index, int))] = storage
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{index_path} is no index of a checkpoint: {error}. {_FIX}") from None
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _entry(entry: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if type(entry) is BytesStorageMetadata:
        return BytesStorageMetadata()
    tensor = _is(entry, TensorStorageMetadata)
    chunks = [
        ChunkStorageMetadata(offsets=_sizes(_is(chunk, ChunkStorageMetadata).offsets), sizes=_sizes(chunk.sizes))
        for chunk in _is(tensor.chunks, list)
    ]
    properties = TensorProperties(dtype=_is(_is(tensor.properties, TensorProperties).dtype, torch.dtype))
    return TensorStorageMetadata(properties=properties, size=_sizes(tensor.size), chunks=chunks)


def _storage(path: str, info: _StorageInfo) -> _StorageInfo:
    """Where a tensor or object lies, by the whole path of its file.

    Raises ValueError for a file outside of the checkpoint.
    """
    name = _is(info.relative_path, str)
    if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise ValueError(f"{name!r} is no file of the folder")
    if info.transform_descriptors:
        raise ValueError(f"{name!r} is to be read through {info.transform_descriptors!r}, which we never write")
    if _is(info.offset, int) < 0 or _is(info.length, int) < 0:
        raise ValueError(f"{info.length} bytes at {info.offset} of {name!r}")
    return _StorageInfo(os.path.join(os.path.abspath(path), name), info.offset, info.length)


def _copy_object(name: str, place: _StorageInfo, objects: io.BufferedWriter) -> _StorageInfo:
    """Load an object under the allow-list and append it to ours; where it lies now."""
    what = f"{place.relative_path} ({name})"
    value = _load(io.BytesIO(_read(place.relative_path, place.offset, place.length)), what)
    if "_extra_state" in name and not _is_empty(value):
        # Transformer Engine unpickles the bytes in it. Only training in fp8, which we do not do, leaves any.
        raise CheckpointError(f"{what} holds the state of a layer trained in fp8, which is a pickle inside. {_FIX}")
    start, buffer = objects.tell(), io.BytesIO()
    torch.save(value, buffer)
    objects.write(buffer.getbuffer())
    return _StorageInfo(os.path.join(os.path.dirname(objects.name), _OBJECTS), start, buffer.getbuffer().nbytes)


def _is_empty(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_empty, value))
    return value.numel() == 0 if isinstance(value, torch.Tensor) else value is None


def _load(data: io.BytesIO, what: str) -> Any:
    """What torch.save wrote, if it is made of tensors, plain values and _OBJECT_GLOBALS."""
    try:
        with torch.serialization.safe_globals(_OBJECT_GLOBALS):
            return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch (2.9 to 2.13): "Unsupported global: GLOBAL posix.system was not an allowed global by default."
        named = re.search(r"GLOBAL (\S+)", str(error))
        asks = f"asks for {named[1]}, which" if named else f"holds what ({str(error).splitlines()[-1]})"
        raise CheckpointError(
            f"{what} {asks} no state of a run needs: loading it would execute a program. {_FIX}"
        ) from None
    except Exception as error:  # noqa: BLE001 torn archives end in nearly any exception
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from None


def _check_format(path: str) -> None:
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if content != _FORMAT:
        raise CheckpointError(f"{path} names the format {content}, known is {_FORMAT}.")


def _read(path: str, start: int = 0, length: int | None = None) -> bytes:
    """All of a file, or a part of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = size - start if length is None else length
            if start + length > size:
                raise CheckpointError(
                    f"{path} has {size} bytes, {length} are to be at {start}: the checkpoint is torn."
                )
            file.seek(start)
            return file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _sizes(value: Any) -> torch.Size:
    return torch.Size([_is(size, int) for size in _is(value, torch.Size)])
