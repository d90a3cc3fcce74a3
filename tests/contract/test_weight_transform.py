"""A transform in the weight stream, before real engines of one and two ranks: what it made is what they hold, by every
transport.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.delta.receiver_client import start_receiver
from slime_like.weight_sync.proof.receipt import Receipt
from slime_like.weight_sync.session import EngineSide
from slime_like.weight_sync.transform import WeightTransform, to_bf16
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import largest_difference, options, order_of

#: SGLang leaves tensors of this name out.
EXTRA = "model.layers.1.self_attn.rotary_emb.inv_freq"


def to_bf16_and_one_more(args, name, tensor):
    """Norms stay as they are; a tensor that no engine keeps comes with the last."""
    converted = [(name, tensor)] if "norm" in name else to_bf16(args, name, tensor)
    return [*converted, (EXTRA, torch.arange(8.0))] if name == "lm_head.weight" else converted


@pytest.fixture
def receiver(tmp_path, request):
    if request.node.callspec.params["transport"] != "delta":
        yield None
        return
    running = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "receiver.log"), timeout_s=30)
    yield running
    running.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk", "delta"])
def test_engines_hold_what_the_transform_made(tp1, tp2, models, model_folder, tmp_path, receiver, transport):
    rounded = copy.deepcopy(models[2])
    with torch.no_grad():
        for name, tensor in rounded.named_parameters():
            if "norm" not in name:
                tensor.copy_(tensor.bfloat16().float())
    engines = [tp1, tp2]
    beside = {} if receiver is None else {"receiver_url": receiver.url, "receiver_key": receiver.key}
    endpoints = tuple(dataclasses.replace(one.engine.endpoint, **beside) for one in engines)
    clients = [EngineClient(endpoint, timeout_s=30) for endpoint in endpoints]
    publisher = make_publisher(
        dataclasses.replace(options(engines, transport, directory=tmp_path / "trainer"), endpoints=endpoints)
    )
    receipt = Receipt(model_from_hf(read_hf_config(str(model_folder)), ModelConfig()), clients, "test")
    transform = WeightTransform(to_bf16_and_one_more, None, "mine")

    def flipped(tensors):
        for name, tensor in tensors:
            if name.endswith("1.mlp.up_proj.weight"):
                tensor.view(torch.int16)[0, 0] ^= 1
            yield name, tensor

    for fault in (None, flipped) if transport == "ipc" else (None,):
        version = max(one.version for one in engines) + 1
        update = EngineSide(order_of(endpoints, transport, version, directory=tmp_path / "trainer"))
        update.begin()
        publisher.connect()
        publisher.begin(version)
        stream = receipt.watching(transform.over(models[2].state_dict().items()))
        report = publisher.send(fault(stream) if fault else stream, version, receipt)
        publisher.finish(version)
        update.load()
        update.open()
        if fault:
            with pytest.raises(WeightSyncError, match=r"model.layers.1.mlp.up_proj.weight is not what was sent"):
                receipt.verify(timeout_s=30)
        else:
            assert receipt.verify(timeout_s=30) == 2
            assert receipt.unknown == [EXTRA]
        update.finish()
        for one in engines:
            one.version = version
        if not fault:
            state = models[2].state_dict()
            assert (report.num_tensors, report.num_bytes) == (
                len(state) + 1,
                sum(t.numel() * (4 if "norm" in name else 2) for name, t in state.items()) + 32,
            )
            assert max(largest_difference(one.client, rounded) for one in engines) < 1e-5
            assert min(largest_difference(one.client, models[2]) for one in engines) > 1e-3
    publisher.close()
