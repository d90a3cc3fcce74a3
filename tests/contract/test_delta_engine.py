"""Deltas through a receiver process into real engines: what they generate with is what transformers computes, version
after version.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.delta.receiver_client import ReceiverClient, start_receiver
from slime_like.weight_sync.proof.receipt import Receipt
from slime_like.weight_sync.session import EngineSide
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import largest_difference, make_model, options, order_of


@pytest.fixture
def receiver(tmp_path):
    running = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "receiver.log"), timeout_s=30)
    yield running
    running.close()


def test_three_versions_by_delta(tp1, tp2, models, model_folder, receiver, tmp_path):
    """One receiver serves engines of one and of two ranks.

    Everything, then a step's small changes, then a version of which nothing changed.
    """
    engines = [tp1, tp2]
    endpoints = tuple(
        dataclasses.replace(one.engine.endpoint, receiver_url=receiver.url, receiver_key=receiver.key)
        for one in engines
    )
    clients = [EngineClient(endpoint, timeout_s=30) for endpoint in endpoints]
    publisher = make_publisher(
        dataclasses.replace(options(engines, "delta", directory=tmp_path / "trainer"), endpoints=endpoints)
    )
    receipt = Receipt(model_from_hf(read_hf_config(str(model_folder)), ModelConfig()), clients, "test")
    stepped = make_model(2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in stepped.parameters():
            tensor.mul_(1 + 0.1 * (torch.rand(tensor.shape, generator=generator) < 0.05))
    sizes = []
    for weights in (models[2], stepped, stepped):
        version = max(one.version for one in engines) + 1
        update = EngineSide(order_of(endpoints, "delta", version))
        update.begin()
        publisher.connect()
        publisher.begin(version)
        sizes.append(publisher.send(receipt.watching(iter(weights.state_dict().items())), version).delta)
        publisher.finish(version)
        update.load()
        update.open()
        assert receipt.verify(timeout_s=30) == 2
        update.finish()
        for one in engines:
            one.version = version
            assert largest_difference(one.client, weights) < 1e-5
            assert one.client.weight_version() == str(version)
    assert [len(count.full_engines) for count in sizes] == [2, 0, 0]
    pairs = list(zip(models[2].state_dict().values(), stepped.state_dict().values(), strict=True))
    assert [count.num_changed for count in sizes[1:]] == [
        sum(int((before != after).sum()) for before, after in pairs),
        0,
    ]
    assert sizes[1].num_elements == sum(tensor.numel() for tensor, _ in pairs)
    # One in twenty changed, to a position and 4 bytes each; at last only digests.
    assert sizes[1].num_bytes < 0.1 * sizes[0].num_bytes and sizes[2].num_bytes < 0.01 * sizes[0].num_bytes
    ReceiverClient(receiver.url, receiver.key, 5.0).begin(99)  # a sync that never ends leaves the folder as it is
    with pytest.raises(WeightSyncError, match="holds version"):
        EngineSide(order_of(endpoints, "delta", 99)).load()
    assert largest_difference(tp1.client, stepped) < 1e-5
    publisher.close()
