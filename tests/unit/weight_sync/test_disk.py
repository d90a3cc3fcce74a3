"""The disk transport's folders."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.base import PublisherOptions
from slime_like.weight_sync.disk import DiskPublisher
from slime_like.weight_sync.envelope import version_directory


def publisher(root, source: int, num_sources: int, buffer_bytes: int = 1 << 20) -> DiskPublisher:
    return DiskPublisher(PublisherOptions("disk", (), source, num_sources, buffer_bytes, 5.0, str(root), "127.0.0.1"))


def test_a_version_appears_when_its_last_source_has_written(tmp_path):
    first, last = torch.arange(6.0).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)
    publisher(tmp_path, 0, 2).send([("a", first), ("b", first.t())], 4)
    folder = version_directory(str(tmp_path), 4)
    assert not os.path.exists(folder)
    report = publisher(tmp_path, 1, 2).send([("c", last)], 4)
    assert (report.num_tensors, report.num_bytes) == (1, 6)
    tensors = {}
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            tensors |= load_file(os.path.join(folder, name))
    assert set(tensors) == {"a", "b", "c"}
    assert torch.equal(tensors["b"], first.t()) and torch.equal(tensors["c"], last)
    assert os.listdir(tmp_path) == [os.path.basename(folder)]


def test_older_versions_are_removed(tmp_path):
    for version in (1, 2, 10):
        publisher(tmp_path, 0, 1).send([("a", torch.zeros(2))], version)
    assert os.listdir(tmp_path) == ["version-00000010"]


def test_remains_of_a_failed_attempt_are_not_served(tmp_path):
    publisher(tmp_path, 0, 2).send([("stale", torch.zeros(2))], 1)
    publisher(tmp_path, 0, 1).send([("a", torch.zeros(2))], 1)
    with open(tmp_path / "version-00000001" / "model.safetensors.index.json") as file:
        assert "stale" not in file.read()


def test_one_tensor_from_two_sources_is_refused(tmp_path):
    publisher(tmp_path, 0, 2).send([("a", torch.zeros(2))], 1)
    with pytest.raises(WeightSyncError, match="a was sent twice"):
        publisher(tmp_path, 1, 2).send([("a", torch.zeros(2))], 1)


def test_second_source_needs_the_first_ones_folder(tmp_path):
    with pytest.raises(WeightSyncError, match="shared between the trainer's nodes"):
        publisher(tmp_path, 1, 2).send([("a", torch.zeros(2))], 1)


def test_buckets_become_files(tmp_path):
    publisher(tmp_path, 0, 1, buffer_bytes=8).send([("a", torch.zeros(2)), ("b", torch.zeros(2))], 1)
    assert sorted(os.listdir(tmp_path / "version-00000001")) == ["model-000-00000.safetensors", "model-000-00001.safetensors", "model.safetensors.index.json"]
