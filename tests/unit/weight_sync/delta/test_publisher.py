"""A trainer source and receivers over HTTP: each gets the difference if it can take it, else everything, and ends with
the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.weight_sync.buckets import PublisherOptions
from slime_like.weight_sync.delta.receiver import ReceiverServer
from slime_like.weight_sync.delta.receiver_client import ReceiverClient, ReceiverError
from slime_like.weight_sync.delta.store import VersionStore
from slime_like.weight_sync.transports.registry import make_publisher

KEY = "0123456789abcdef0123"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool)


class Receiver:
    """A receiver in a thread of this process, which can be ended and started again with the same folder."""

    def __init__(self, directory: Path, max_bytes: int = 1 << 24):
        self.directory, self.max_bytes = str(directory), max_bytes
        self.port = 0
        self.start()

    def start(self) -> None:
        self.store = VersionStore(self.directory, max_shard_bytes=self.max_bytes)
        self.server = ReceiverServer(("127.0.0.1", self.port), self.store, api_key=KEY, max_bytes=self.max_bytes)
        self.port = self.server.port
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(timeout=10)
        self.server.close()
        self.store.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def weights(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        folder = self.store.state()["folder"]
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                tensors |= load_file(os.path.join(folder, name))
        return tensors


@pytest.fixture
def receivers(tmp_path):
    pair = [Receiver(tmp_path / f"receiver-{number}") for number in range(2)]
    yield pair
    for receiver in pair:
        with contextlib.suppress(OSError):
            receiver.stop()


def publisher_to(receivers, tmp_path, *, encoding="xor", source=0, num_sources=1, key=KEY):
    endpoints = tuple(
        EngineEndpoint(index=i, url="http://127.0.0.1:1", receiver_url=r.url, receiver_key=key)
        for i, r in enumerate(receivers)
    )
    return make_publisher(
        PublisherOptions(
            "delta",
            endpoints,
            source,
            num_sources,
            4000,
            20.0,
            str(tmp_path / "trainer"),
            "127.0.0.1",
            delta_encoding=encoding,
        )
    )


def sync(publisher, tensors, version):
    publisher.connect()
    publisher.begin(version)
    report = publisher.send(iter(tensors.items()), version)
    publisher.finish(version)
    return report


def model(seed: int) -> dict[str, torch.Tensor]:
    """Several buckets of every type, random bits (nan included), and a tensor without elements."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, dtype in enumerate(DTYPES):
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 256, (30 * 40 * size,), dtype=torch.uint8, generator=generator)
        tensors[f"layers.{number}.weight"] = (
            bits.remainder(2).view(dtype).view(30, -1) if dtype == torch.bool else bits.view(dtype).view(30, 40)
        )
    return tensors | {"empty": torch.zeros(0, 5)}


def nudged(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The same, one element of one tensor with other bits."""
    changed = {key: tensor.clone() for key, tensor in tensors.items()}
    changed[name].view(torch.uint8).reshape(-1)[77] ^= 1
    return changed


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape
        assert (
            actual[name].contiguous().view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist()
            if tensor.numel()
            else True
        )


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_versions_follow_one_another_bit_for_bit(receivers, tmp_path, encoding):
    publisher = publisher_to(receivers, tmp_path, encoding=encoding)
    first, second = model(1), model(2)
    whole = sync(publisher, first, 1)
    assert whole.delta.full_engines == {0, 1} and whole.delta.num_elements == 0
    third = nudged(second, "layers.1.weight")
    for version, tensors in ((2, second), (3, third), (4, third)):
        report = sync(publisher, tensors, version)
        assert report.delta.full_engines == frozenset()
        assert (report.num_tensors, report.num_bytes) == (
            len(tensors),
            sum(t.numel() * t.element_size() for t in tensors.values()),
        )
        for receiver in receivers:
            assert receiver.store.state()["version"] == version
            assert_same(receiver.weights(), tensors)
        if version > 2:
            assert report.delta.num_changed == (version == 3)
            assert report.delta.num_bytes < whole.delta.num_bytes / 8
    publisher.close()
    assert not os.path.exists(tmp_path / "trainer/source-000")


def test_a_receiver_that_missed_a_version_gets_everything(receivers, tmp_path):
    both, one = publisher_to(receivers, tmp_path), publisher_to(receivers[1:], tmp_path / "other")
    first, second, third = model(1), model(2), model(3)
    sync(both, first, 1)
    sync(both, second, 2)
    sync(one, first, 1)  # somebody else's weights, of the same name
    report = sync(both, third, 3)
    assert report.delta.full_engines == {1}
    assert 0 < report.delta.num_changed <= report.delta.num_elements
    for receiver in receivers:
        assert_same(receiver.weights(), third)
    receivers[0].stop()
    receivers[0].start()
    report = sync(both, nudged(third, "layers.0.weight"), 4)
    assert report.delta.full_engines == frozenset(), "a restart forgets nothing"
    assert_same(receivers[0].weights(), nudged(third, "layers.0.weight"))


def test_what_a_receiver_refuses_is_named_and_sent_again_whole(receivers, tmp_path, caplog):
    publisher = publisher_to(receivers, tmp_path)
    first, second = model(1), model(2)
    sync(publisher, first, 1)
    folder = receivers[1].store.state()["folder"]
    path = os.path.join(folder, sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))[0])
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 4]))
    report = sync(publisher, second, 2)
    assert report.delta.full_engines == {1}
    for receiver in receivers:
        assert_same(receiver.weights(), second)
    (warning,) = [record.message for record in caplog.records if "sent again" in record.message]
    assert "layers.0.weight: before the change its digest is" in warning and receivers[1].url in warning


def test_a_damaged_copy_at_the_trainer_does_no_harm(receivers, tmp_path, caplog):
    publisher = publisher_to(receivers, tmp_path)
    sync(publisher, model(1), 1)
    path = tmp_path / "trainer/source-000/bucket-00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    second = model(2)
    report = sync(publisher, second, 2)
    assert report.delta.full_engines == frozenset()
    assert_same(receivers[0].weights(), second)
    assert "the kept copy of layers.0.weight is damaged" in caplog.text


def test_a_failed_sync_is_followed_by_a_whole_one(receivers, tmp_path):
    publisher = publisher_to(receivers, tmp_path)
    first, second = model(1), model(2)
    sync(publisher, first, 1)

    def broken():
        yield from list(second.items())[:4]
        raise RuntimeError("the trainer stops")

    publisher.begin(2)
    with pytest.raises(RuntimeError, match="stops"):
        publisher.send(broken(), 2)
    publisher.abandon(2)
    assert_same(receivers[0].weights(), first)
    assert sync(publisher, second, 2).delta.full_engines == {0, 1}
    assert_same(receivers[0].weights(), second)


def test_two_sources_make_one_version(receivers, tmp_path):
    sources = [publisher_to(receivers, tmp_path, source=number, num_sources=2) for number in range(2)]
    for version, tensors in ((1, model(1)), (2, model(2))):
        items = list(tensors.items())
        for publisher in sources:
            publisher.begin(version)
        sources[1].send(iter(items[3:]), version)
        with pytest.raises(ReceiverError, match=r"sources \[1\] of 2"):
            sources[0].finish(version)
        sources[0].send(iter(items[:3]), version)
        for publisher in sources:
            publisher.finish(version)
        assert_same(receivers[0].weights(), tensors)


def test_strangers_and_floods_are_refused(receivers, tmp_path):
    with pytest.raises(ReceiverError, match=r"401.*the key is wrong"):
        sync(publisher_to(receivers, tmp_path, key="wrong"), model(1), 1)
    with pytest.raises(ReceiverError, match="401"):
        ReceiverClient(receivers[0].url, None, 5.0).send_shard(bytes(100))
    client = ReceiverClient(receivers[0].url, KEY, 5.0)
    with pytest.raises(ReceiverError, match=r"413.*16777217 bytes, at most 16777216"):
        client.send_shard(bytes((1 << 24) + 1))
    with pytest.raises(ReceiverError, match=r"422.*no frame"):
        client.send_shard(b"x" * 100)
    for body, message in (
        ({"version": -1}, "whole number"),
        ({"version": True}, "whole number"),
        ({"v": 1}, "must have the fields version"),
    ):
        with pytest.raises(ReceiverError, match=f"400.*{message}"):
            client._request("POST", "/begin", body)
    with pytest.raises(ReceiverError, match="413"):
        client._request("POST", "/begin", b" " * 70_000)
    with pytest.raises(ReceiverError, match="404"):
        client._request("GET", "/../../etc/passwd")
    assert client.state().version is None


def test_an_engine_without_a_receiver_is_named(tmp_path):
    options = PublisherOptions(
        "delta", (EngineEndpoint(index=3, url="http://e"),), 0, 1, 4000, 5.0, str(tmp_path), "127.0.0.1"
    )
    with pytest.raises(WeightSyncError, match="engine 3 at http://e has no receiver"):
        make_publisher(options)


def test_who_was_left_out_gets_everything_later_and_the_others_the_difference_all_the_time(receivers, tmp_path):
    publisher, versions = publisher_to(receivers, tmp_path), [model(1)]
    for _ in range(3):
        versions.append(nudged(versions[-1], "layers.0.weight"))
    both = publisher._options.endpoints
    assert sync(publisher, versions[0], 1).delta.full_engines == {0, 1}
    publisher.redirect(both[:1])
    for version in (2, 3):
        report = sync(publisher, versions[version - 1], version)
        assert not report.delta.full_engines and report.delta.num_changed == 1
    assert_same(receivers[1].weights(), versions[0])
    publisher.redirect(both)
    report = sync(publisher, versions[3], 4)
    assert report.delta.full_engines == {1} and report.delta.num_changed == 1
    for receiver in receivers:
        assert_same(receiver.weights(), versions[3])
    publisher.close()
