"""A version's folder says what is in it, and damage is noticed before it is used."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_like.weight_sync.delta.codec import DeltaError, digest
from slime_like.weight_sync.delta.frame import TensorKey, source_digest
from slime_like.weight_sync.delta.version_folder import (
    ShardFile,
    Version,
    check_version,
    read_version,
    safetensors_header,
    write_index,
    write_manifest,
)

KEYS = [TensorKey("a", "F32", (2, 3)), TensorKey("b", "U8", (5,))]
DATA = [np.arange(6, dtype="<f4").tobytes(), bytes(range(5))]


def written(folder) -> Version:
    header = safetensors_header(KEYS)
    tensors = tuple((key, digest(np.frombuffer(data, np.uint8))) for key, data in zip(KEYS, DATA, strict=True))
    (folder / "model.safetensors").write_bytes(header + b"".join(DATA))
    shards = {(0, 0): ShardFile("model.safetensors", len(header), tensors)}
    version = Version(str(folder), 4, 7, {0: source_digest([(0, tensors)])}, shards)
    write_index(str(folder), version.shards.values())
    write_manifest(str(folder), version)
    return version


def test_what_is_written_is_read_and_is_safetensors(tmp_path):
    version = written(tmp_path)
    assert read_version(str(tmp_path)) == version
    check_version(version)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and loaded["b"].tolist() == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 29},
        "weight_map": {"a": "model.safetensors", "b": "model.safetensors"},
    }


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1] + b"\xff", "model.safetensors, b: its digest"),
        (lambda data: data[:-1], "bytes, it must have"),
        (lambda data: data[:-6] + b"\xff" + data[-5:], "model.safetensors, a: its digest"),
    ],
    ids=["a bit", "the end", "the first tensor"],
)
def test_damage_names_file_and_tensor(tmp_path, damage, message):
    version, path = written(tmp_path), tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DeltaError, match=message):
        check_version(version)


def test_a_manifest_of_another_format_is_refused(tmp_path):
    written(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format 2, known is 1"):
        read_version(str(tmp_path))


def test_a_share_that_is_not_the_sources_is_refused(tmp_path):
    written(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sources"]["0"] = source_digest([])
    path.write_text(json.dumps(manifest))
    with pytest.raises(DeltaError, match="digest of source 0"):
        check_version(read_version(str(tmp_path)))
