"""The disk transport's folders."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from weight_sync.alive_bytes import Alive

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.session import version_directory
from slime_like.weight_sync.transports.disk import DiskPublisher
from slime_like.weight_sync.transports.registry import PublisherOptions
from tests.helpers.full_disks import largest_file


def publisher(root, source: int, num_sources: int, buffer_bytes: int = 1 << 20, **more) -> DiskPublisher:
    return DiskPublisher(
        PublisherOptions("disk", (), source, num_sources, buffer_bytes, 5.0, str(root), "127.0.0.1", **more)
    )


def read(folder) -> dict[str, torch.Tensor]:
    files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_version_appears_when_all_sources_have_written(tmp_path):
    first, last = torch.arange(6.0).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)
    one, other = publisher(tmp_path, 0, 2), publisher(tmp_path, 1, 2)
    for each in (one, other):
        each.begin(4)
    report = other.send([("c", last)], 4)  # in any order
    one.send([("a", first), ("b", first.t()), ("none", torch.zeros(0, 3))], 4)
    assert (report.num_tensors, report.num_bytes) == (1, 6)
    folder = version_directory(str(tmp_path), 4)
    assert not os.path.exists(folder)
    for each in (other, one):
        each.finish(4)
    tensors = read(folder)
    assert set(tensors) == {"a", "b", "c", "none"}
    assert torch.equal(tensors["b"], first.t()) and torch.equal(tensors["c"], last) and tensors["none"].shape == (0, 3)
    assert os.listdir(tmp_path) == [os.path.basename(folder)]


def test_writers_of_a_source_share_its_tensors(tmp_path):
    tensors = [(f"t{number}", torch.full((10 * number + 1,), float(number))) for number in range(7)]
    writers = [publisher(tmp_path, 0, 1, writer_index=index, num_writers=2) for index in range(2)]
    for writer in writers:
        writer.begin(1)
    with ThreadPoolExecutor() as pool:
        reports = list(pool.map(lambda writer: writer.send(iter(tensors), 1), writers))
    for writer in writers:
        writer.finish(1)
    assert sum(report.num_tensors for report in reports) == 7
    # Greedily by bytes: 0, 2, 4, 6 hold 124 elements; 1, 3, 5 hold 93.
    assert [report.num_bytes for report in reports] == [4 * 124, 4 * 93]
    written = read(version_directory(str(tmp_path), 1))
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors) and len(written) == 7


def test_every_type_can_be_read_back(tmp_path):
    types = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    )
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (*types, torch.uint8, torch.bool)}
    publisher(tmp_path, 0, 1).send(tensors.items(), 1)
    written = read(version_directory(str(tmp_path), 1))
    assert all(
        written[name].dtype == tensor.dtype and torch.equal(written[name].double(), tensor.double())
        for name, tensor in tensors.items()
    )


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    publisher(tmp_path, 0, 1).send([("small", torch.zeros(10))], 1)
    failing = publisher(tmp_path, 0, 1)
    message = r"cannot be written to: File too large .* bytes are free. Engines keep the weights"
    with largest_file(100_000), pytest.raises(WeightSyncError, match=message + ".*--update-weight-disk-dir") as caught:
        failing.send([("large", torch.zeros(50_000))], 2)
    assert str(tmp_path) in str(caught.value)
    failing.abandon(2)
    assert os.listdir(tmp_path) == ["version-00000001"]


def test_no_more_than_two_buckets_are_alive(tmp_path):
    writer = publisher(tmp_path, 0, 1, buffer_bytes=100_000)
    alive = Alive(writer._slots)
    for version in (1, 2):
        writer.send(alive.stream([50_000, 10_000, 49_999, 1] * 20), version)
    assert 100_000 < alive.most <= 2 * 100_000
    writer.close()
    assert alive.now == 0 and all(slot.memory.numel() == 0 for slot in writer._slots)


def test_older_versions_can_be_kept(tmp_path):
    for version in (1, 2):
        publisher(tmp_path, 0, 1, keep_files=True).send([("a", torch.zeros(2))], version)
    assert sorted(os.listdir(tmp_path)) == ["version-00000001", "version-00000002"]


def test_older_versions_are_removed(tmp_path):
    sender = publisher(tmp_path, 0, 1)
    for version in (1, 2, 10):
        sender.send([("a", torch.zeros(2))], version)
    sender.close()  # they are removed while engines load
    assert os.listdir(tmp_path) == ["version-00000010"]


def test_remains_of_a_failed_attempt_are_not_served(tmp_path):
    failed = publisher(tmp_path, 0, 2)
    failed.begin(1)
    failed.send([("stale", torch.zeros(2))], 1)
    publisher(tmp_path, 0, 1).send([("a", torch.zeros(2))], 1)
    with open(tmp_path / "version-00000001" / "model.safetensors.index.json") as file:
        assert "stale" not in file.read()


def test_one_tensor_from_two_sources_is_refused(tmp_path):
    sources = [publisher(tmp_path, index, 2) for index in range(2)]
    sources[0].begin(1)
    for source in sources:
        source.send([("a", torch.zeros(2))], 1)
    with pytest.raises(WeightSyncError, match="a was sent twice"):
        sources[0].finish(1)


def test_second_source_needs_the_first_ones_folder(tmp_path):
    with pytest.raises(WeightSyncError, match="shared between the trainer's nodes"):
        publisher(tmp_path, 1, 2).send([("a", torch.zeros(2))], 1)


def test_buckets_become_files(tmp_path):
    publisher(tmp_path, 0, 1, buffer_bytes=16).send([("a", torch.zeros(2)), ("b", torch.zeros(2))], 1)
    files = sorted(os.listdir(tmp_path / "version-00000001"))
    assert files == [
        "model-000-000-00000.safetensors",
        "model-000-000-00001.safetensors",
        "model.safetensors.index.json",
    ]
