"""Trainer ranks are reached at one address, and where they meet in a private file not even their store listens."""

import os
import subprocess
import sys

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, run_ranks

pytestmark = pytest.mark.multiprocess

#: Another user's attempt: connect, list the keys of the store, set one and delete one.
STRANGER = """
import datetime, os, sys
from torch.distributed import TCPStore  # while we may read the interpreter's files
os.setuid(65534)
two_seconds = datetime.timedelta(seconds=2)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=two_seconds)
store.set("stranger", "was here")
print(len(store.list_keys()), store.delete_key("stranger"))
"""


def listeners():
    import psutil

    return sorted(
        {
            (at.laddr.ip, at.laddr.port)
            for at in psutil.Process().net_connections("tcp")
            if at.status == psutil.CONN_LISTEN
        }
    )


def in_world(place, folder, port, store_path):
    import torch

    from slime_like.megatron_backend.worker import TrainWorker

    results = {}
    for name, options in (("file", {"store_path": store_path, "master_port": 0}), ("address", {"master_port": port})):
        before = listeners()
        worker = TrainWorker(make_config(folder, num_ranks=2), **(place | options))
        worker.start()
        results[name] = [at for at in listeners() if at not in before]
        if place["rank"] == 0 and os.geteuid() == 0:
            asked = subprocess.run(
                [sys.executable, "-c", STRANGER, str(port)], capture_output=True, text=True, timeout=60
            )
            results[name, "stranger"] = asked.stdout or asked.stderr
        torch.distributed.barrier()
        worker.close()
    return results


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("ports")  # 0700, as the folders of a run are
    folder = make_tiny_model(str(root / "model"), "qwen3", tied=True, num_layers=1)
    port = free_ports(1)[0]
    return run_ranks(in_world, 2, folder, port, str(root / "store"), timeout_s=100), port


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["file", "address"])
def test_nothing_listens_beyond_the_loopback_interface(world, name, rank):
    results, port = world
    assert results[rank][name], "gloo listens"
    assert {address for address, _ in results[rank][name]} == {"127.0.0.1"}
    assert (("127.0.0.1", port) in results[rank][name]) == (name == "address" and rank == 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_reaches_a_store_that_listens_and_none_that_is_a_file(world):
    results, _ = world
    assert "DistNetworkError" in results[0]["file", "stranger"]
    keys, was_deleted = results[0]["address", "stranger"].split()
    assert int(keys) > 10 and was_deleted == "True", "an address keeps other machines out, not other users of this one"
