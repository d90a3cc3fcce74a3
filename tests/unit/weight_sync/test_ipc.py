"""Shared memory: what is written, that it is removed, and what the engine's loader refuses."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys

import pytest
import torch
from sglang_backend.fake_http import serve

from slime_like.errors import EngineError, WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend import shared_memory
from slime_like.weight_sync import shm_loader
from slime_like.weight_sync.base import PublisherOptions
from slime_like.weight_sync.ipc import IpcPublisher

OK = (200, {"success": True})


class Model:
    """Takes weights as a model in SGLang does."""

    def __init__(self):
        self.got: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs):
        self.got |= {name: tensor.clone() for name, tensor in pairs}


def publisher(url: str, buffer_bytes: int = 1 << 20, tp_size: int = 2) -> IpcPublisher:
    endpoint = EngineEndpoint(index=0, url=url, tp_size=tp_size)
    return IpcPublisher(PublisherOptions("ipc", (endpoint,), 0, 1, buffer_bytes, 5.0, None, "127.0.0.1"))


@pytest.fixture(autouse=True)
def announced_folder(monkeypatch):
    monkeypatch.setenv(shm_loader.DIRECTORY_VARIABLE, shared_memory.shared_directory())


def test_tensors_arrive_in_buckets_and_nothing_is_left():
    model, files = Model(), []

    def engine(body):
        assert len(body["serialized_named_tensors"]) == 2  # one per rank
        named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        path = bytes(named[0][1].tolist()).decode()
        files.append(path)
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0  # nobody else gets in
        shm_loader.load(model, named)
        return OK

    flat = torch.arange(12.0)
    tensors = [("a", flat[:4].view(2, 2)), ("b", flat[4:8]), ("c", flat.view(3, 4).t())]
    with serve({"/update_weights_from_tensor": engine}) as server:
        sender = publisher(server.url, buffer_bytes=32)
        sender.connect()
        report = sender.send(iter(tensors), 3)
        assert len(files) == 2 and not any(map(os.path.exists, files))
        sender.close()
    assert not os.path.exists(os.path.dirname(files[0]))
    assert report.num_tensors == 3 and report.num_bytes == 80
    for name, tensor in tensors:
        assert torch.equal(model.got[name], tensor)


def test_file_is_removed_when_the_engine_refuses():
    with serve({"/update_weights_from_tensor": (400, {"success": False, "message": "no session"})}) as server:
        sender = publisher(server.url)
        with pytest.raises(EngineError, match="no session"):
            sender.send([("a", torch.zeros(2))], 1)
        assert os.listdir(sender._directory) == []
        sender.close()


def test_folder_of_a_killed_process_is_removed_by_the_next_one():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = os.path.join(shared_memory.make_shared_directory(), f"{child.pid}-source-0-x")
    os.mkdir(left)
    sender = publisher("http://127.0.0.1:1")
    sender.connect()
    assert not os.path.exists(left)
    sender.close()


def test_engine_on_another_host_is_refused():
    with pytest.raises(WeightSyncError, match="192.0.2.7.*not on this host"):
        publisher("http://192.0.2.7:30000").connect()


def test_loader_reads_only_from_the_announced_folder(tmp_path, monkeypatch):
    folder, outside = tmp_path / "in", tmp_path / "in-not"
    folder.mkdir()
    outside.write_text("x")
    (folder / "good").write_text("x")
    (folder / "link").symlink_to(outside)
    assert shm_loader.checked_path(str(folder / "good"), str(folder)) == str(folder / "good")
    for bad in (outside, folder / "link", folder / ".." / "in-not", folder):
        with pytest.raises(PermissionError):
            shm_loader.checked_path(str(bad), str(folder))
    with pytest.raises(PermissionError, match="not set"):
        shm_loader.checked_path(str(folder / "good"), None)


def test_names_shared_by_launcher_and_loader_agree():
    assert shm_loader.DIRECTORY_VARIABLE == shared_memory.DIRECTORY_VARIABLE
    module, _, function = shared_memory.WEIGHT_LOADER.rpartition(".")
    assert getattr(sys.modules[module], function) is shm_loader.load


def test_loader_imports_nothing_heavy():
    code = "import sys, slime_like.weight_sync.shm_loader; assert not {'torch', 'requests', 'safetensors', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_foreign_folder_in_our_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_ROOT", str(tmp_path))
    os.symlink(tmp_path, shared_memory.shared_directory())
    with pytest.raises(WeightSyncError, match="Fix: remove it"):
        shared_memory.make_shared_directory()
