"""Files that are not whole are found before an engine sees them."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.transports.shards import check_whole


@pytest.fixture
def folder(tmp_path):
    for number in range(2):
        save_file(
            {f"tensor{number}": torch.zeros(3, 5)}, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"}
        )
    weight_map = {f"tensor{number}": f"model-{number}.safetensors" for number in range(2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_whole_files_and_folders_elsewhere_pass(folder):
    check_whole(str(folder))
    check_whole(str(folder / "on-another-machine"))


@pytest.mark.parametrize(("change", "words"), [(-1, "is cut off: "), (-10_000, "is cut off: "), (1, "is too long: ")])
def test_another_length(folder, change, words):
    path = folder / "model-1.safetensors"
    os.truncate(path, max(0, path.stat().st_size + change))
    with pytest.raises(WeightSyncError, match=rf"model-1\.safetensors {words}"):
        check_whole(str(folder))


def test_a_header_of_noise(folder):
    path = folder / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * (path.stat().st_size - 8))
    with pytest.raises(WeightSyncError, match=r"model-0\.safetensors has no readable header"):
        check_whole(str(folder))


def test_a_missing_file(folder):
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(WeightSyncError, match=r"model-1\.safetensors is missing"):
        check_whole(str(folder))
