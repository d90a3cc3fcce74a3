"""What a checkpoint folder may hold: everything that a run needs, and no name of a function."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import FileSystemReader
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
from slime_like.megatron_backend.checkpoint.reader import checked_copy

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
WEIGHT = torch.arange(6.0).reshape(2, 3)
RNG = {"numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state(), "random": (3, (1, 2), None)}
OBJECT = "rng_state/shard_0_1"
ASKED = {"rng_state": ShardedObject("rng_state", None, (1,), (0,))}


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def index_of(*, weight: bytes, thing: bytes, name: str = "__0_0.distcp") -> Metadata:
    zero = torch.Size([0, 0])
    return Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(
                TensorProperties(), WEIGHT.size(), [ChunkStorageMetadata(zero, WEIGHT.size())]
            ),
            OBJECT: BytesStorageMetadata(),
            "unasked/shard_0_1": BytesStorageMetadata(),
        },
        storage_data={
            MetadataIndex("weight", zero, 0): _StorageInfo(name, 0, len(weight)),
            MetadataIndex(OBJECT): _StorageInfo(name, len(weight), len(thing)),
            MetadataIndex("unasked/shard_0_1"): _StorageInfo(name, 10**12, 10**12),
        },
    )


def make(folder, *, index=None, common=None, thing=None, file_format=None) -> str:
    os.makedirs(folder)
    weight, thing = saved(WEIGHT), saved(RNG) if thing is None else thing
    contents = {
        "metadata.json": json.dumps(FORMAT if file_format is None else file_format).encode(),
        "common.pt": saved({"iteration": 7, "optimizer": {"param_groups": [{"lr": 0.5}]}})
        if common is None
        else common,
        ".metadata": pickle.dumps(index_of(weight=weight, thing=thing)) if index is None else index,
        "__0_0.distcp": weight + thing,
    }
    for name, data in contents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    return str(folder)


def test_everything_comes_back_from_a_copy_that_is_ours_alone(tmp_path):
    path = make(tmp_path / "saved")
    with checked_copy(path, ASKED) as copy:
        assert os.stat(copy).st_mode & 0o777 == 0o700
        os.rename(path, path + "-moved")  # what was read once is not read again
        common = torch.load(os.path.join(copy, "common.pt"))
        index = FileSystemReader(copy).read_metadata()
        place = index.storage_data[MetadataIndex(OBJECT)]
        with open(os.path.join(copy, place.relative_path), "rb") as file:
            thing = torch.load(io.BytesIO(file.read()[place.offset : place.offset + place.length]), weights_only=False)
    assert not os.path.exists(copy)
    assert common == {"iteration": 7, "optimizer": {"param_groups": [{"lr": 0.5}]}}
    assert set(index.state_dict_metadata) == {"weight", OBJECT}, "what nobody asked for is left out"
    theirs = index_of(weight=saved(WEIGHT), thing=b"")
    assert index.state_dict_metadata["weight"] == theirs.state_dict_metadata["weight"]
    assert index.storage_data[MetadataIndex("weight", (0, 0))] == _StorageInfo(
        os.path.join(path, "__0_0.distcp"), 0, len(saved(WEIGHT))
    )
    assert thing["random"] == RNG["random"] and torch.equal(thing["torch"], RNG["torch"])
    assert (
        thing["numpy"][0] == "MT19937"
        and np.array_equal(thing["numpy"][1], RNG["numpy"][1])
        and thing["numpy"][2:] == RNG["numpy"][2:]
    )


def refusal(path: str) -> str:
    with pytest.raises(CheckpointError) as refused, checked_copy(path, ASKED):
        pass
    return str(refused.value)


@pytest.mark.parametrize("part", ["index", "common", "thing"])
def test_a_program_in_it_is_named_and_not_executed(tmp_path, part, monkeypatch):
    # Megatron's own torch.load of common.pt would then run it
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    program = Runs(tmp_path / "executed")
    path = make(tmp_path / "saved", **{part: pickle.dumps(program) if part == "index" else saved({"state": program})})
    name = {"index": ".metadata", "common": "common.pt", "thing": f"__0_0.distcp ({OBJECT})"}[part]
    message = refusal(path)
    assert (
        message.startswith(f"{os.path.join(path, name)} asks for posix.mkdir")
        and "Nothing of it was executed" in message
    )
    assert not os.path.exists(tmp_path / "executed")
    readers = {
        "index": lambda: FileSystemReader(path).read_metadata(),
        "common": lambda: torch.load(os.path.join(path, "common.pt")),
        "thing": lambda: torch.load(io.BytesIO(saved(program)), weights_only=False),
    }
    with contextlib.suppress(AttributeError):  # a folder's name is no index
        readers[part]()
    assert os.path.exists(tmp_path / "executed"), "this is what torch does with it"


OTHERS = [
    "builtins.eval",
    "builtins.getattr",
    "torch.load",
    "torch.distributed.checkpoint.metadata.Enum",
    "copyreg._reconstructor",
]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_name_is_refused_in_an_index(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    by_name = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."  # the opcode GLOBAL
    assert f"asks for {name}," in refusal(make(tmp_path / "old", index=by_name))
    dotted = b"\x80\x04\x8c\x05torch\x8c" + bytes([len("hub.load")]) + b"hub.load\x93."  # STACK_GLOBAL follows dots
    assert "asks for torch.hub.load," in refusal(make(tmp_path / "new", index=dotted))


def test_an_index_does_not_lead_out_of_the_folder(tmp_path):
    for number, name in enumerate(["../secret", "/etc/passwd", "..", "", "a/b"]):
        index = index_of(weight=saved(WEIGHT), thing=saved(RNG), name=name)
        assert f"{name!r} is no file of the folder" in refusal(make(tmp_path / str(number), index=pickle.dumps(index)))


def test_an_index_of_other_things_is_refused(tmp_path):
    plain = index_of(weight=saved(WEIGHT), thing=saved(RNG))
    changes = {
        "a list where a Size belongs": (
            "state_dict_metadata",
            "weight",
            TensorStorageMetadata(TensorProperties(), [2, 3], []),
        ),
        "a str where a dtype belongs": (
            "state_dict_metadata",
            "weight",
            TensorStorageMetadata(TensorProperties(dtype="float32"), WEIGHT.size(), []),
        ),
        "a str where a int belongs": ("storage_data", MetadataIndex(OBJECT), _StorageInfo("__0_0.distcp", "0", 1)),
        "the checkpoint is torn": ("storage_data", MetadataIndex(OBJECT), _StorageInfo("__0_0.distcp", 0, 10**12)),
        "which we never write": ("storage_data", MetadataIndex(OBJECT), _StorageInfo("__0_0.distcp", 0, 1, ["zstd"])),
    }
    for number, (message, (field, key, value)) in enumerate(changes.items()):
        index = Metadata(
            **{"state_dict_metadata": dict(plain.state_dict_metadata), "storage_data": dict(plain.storage_data)}
        )
        getattr(index, field)[key] = value
        assert message in refusal(make(tmp_path / str(number), index=pickle.dumps(index)))
    assert "it holds a dict" in refusal(make(tmp_path / "dict", index=pickle.dumps({})))
    assert "is no index of a checkpoint" in refusal(make(tmp_path / "noise", index=b"\x80\x04noise"))
    assert "names the format" in refusal(make(tmp_path / "zarr", file_format=FORMAT | {"sharded_backend": "zarr"}))


def test_a_layer_state_that_is_a_pickle_inside_is_refused(tmp_path):
    name = "decoder.layers.0.linear._extra_state/shard_0_1"
    asked = {"state": ShardedObject("decoder.layers.0.linear._extra_state", None, (1,), (0,))}
    full = torch.frombuffer(bytearray(b"pickle"), dtype=torch.uint8)
    cases = [([None], False), (None, False), (torch.empty(0), False), (full, True), ([full], True)]
    for number, (value, is_refused) in enumerate(cases):
        index = index_of(weight=saved(WEIGHT), thing=saved(value))
        index.state_dict_metadata[name] = index.state_dict_metadata.pop(OBJECT)
        index.storage_data[MetadataIndex(name)] = index.storage_data.pop(MetadataIndex(OBJECT))
        path = make(tmp_path / str(number), index=pickle.dumps(index), thing=saved(value))
        with (
            pytest.raises(CheckpointError, match="fp8") if is_refused else contextlib.nullcontext(),
            checked_copy(path, asked),
        ):
            pass
