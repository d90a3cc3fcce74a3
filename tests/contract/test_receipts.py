"""A receipt agrees with what a real engine holds, at one and two ranks, and names the first tensor that is not what was
sent.
"""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from slime_like.weight_sync.proof.receipt import Receipt, never_sent
from slime_like.weight_sync.session import EngineSide
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import FLAGS, options, order_of
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model_config(model_folder) -> ModelConfig:
    return model_from_hf(read_hf_config(str(model_folder)), ModelConfig())


def send_and_verify(engines, tensors, model_config, tmp_path, transport="ipc", fault=None):
    """One sync whose tensors pass `fault` after they were taken into the receipt; the number of engines that agree."""
    version = max(one.version for one in engines) + 1
    clients = [one.client for one in engines]
    publisher = make_publisher(options(engines, transport, directory=tmp_path))
    receipt = Receipt(model_config, clients, "test")
    update = EngineSide(order_of([client.endpoint for client in clients], transport, version, directory=tmp_path))
    update.begin()
    stream = receipt.watching(tensors.items())
    publisher.send(fault(stream) if fault else stream, version, receipt)
    try:
        update.load()
        update.open()
        return receipt.verify(timeout_s=30)
    finally:
        publisher.close()
        update.finish()
        for one in engines:
            one.version = version
        assert receipt.unknown == []


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk"])
def test_engines_hold_what_was_sent(tp1, tp2, models, model_config, tmp_path, transport, monkeypatch):
    if transport != "disk":  # what streams is proven on the way: not one more request
        monkeypatch.setattr(Receipt, "_wrong_ranks", lambda *_: pytest.fail("an engine was asked again"))
    for seed in (2, 1):
        assert send_and_verify([tp1, tp2], models[seed].state_dict(), model_config, tmp_path, transport) == 2


def changed(name, change):
    def fault(stream):
        for tensor_name, tensor in stream:
            yield tensor_name, (change(tensor.clone()) if tensor_name == name else tensor)

    return fault


def dropped(name):
    return lambda stream: ((tensor_name, tensor) for tensor_name, tensor in stream if tensor_name != name)


def exchanged(one, other):
    def fault(stream):
        tensors = dict(stream)
        tensors[one], tensors[other] = tensors[other], tensors[one]
        return iter(tensors.items())

    return fault


def flip_last_bit(tensor):
    tensor.view(torch.int32).reshape(-1)[-1] ^= 1
    return tensor


LAYER = "model.layers.1."
FAULTS = {
    "a dropped tensor": (LAYER + "mlp.down_proj.weight", dropped(LAYER + "mlp.down_proj.weight")),
    "one bit": (LAYER + "self_attn.o_proj.weight", changed(LAYER + "self_attn.o_proj.weight", flip_last_bit)),
    "one bit in the embedding's last row": (
        "model.embed_tokens.weight",
        changed("model.embed_tokens.weight", flip_last_bit),
    ),
    "a square matrix transposed": (
        LAYER + "self_attn.q_proj.weight",
        changed(LAYER + "self_attn.q_proj.weight", lambda t: t.T.contiguous()),
    ),
    "k and v exchanged": (
        LAYER + "self_attn.k_proj.weight",
        exchanged(LAYER + "self_attn.k_proj.weight", LAYER + "self_attn.v_proj.weight"),
    ),
    "gate and up exchanged": (
        LAYER + "mlp.gate_proj.weight",
        exchanged(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
    ),
    "a norm of another layer": (
        LAYER + "input_layernorm.weight",
        exchanged("model.layers.0.input_layernorm.weight", LAYER + "input_layernorm.weight"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_changed_on_the_way_is_named(tp1, tp2, models, model_config, tmp_path, fault):
    name, change = FAULTS[fault]
    tensors = {key: tensor.clone() for key, tensor in models[2].state_dict().items()}
    for key, tensor in tensors.items():
        if "norm" in key:  # all ones in a fresh model: exchanging them would change nothing
            tensor.copy_(torch.rand_like(tensor))
    send_and_verify([tp1, tp2], models[1].state_dict(), model_config, tmp_path)
    for one in (tp1, tp2):
        with pytest.raises(WeightSyncError, match="is not what was sent") as caught:
            send_and_verify([one], tensors, model_config, tmp_path, fault=change)
        assert f"engine {one.client.endpoint.index} " in str(caught.value)
        first = name if fault != "a norm of another layer" else "model.layers.0.input_layernorm.weight"
        assert f"{first} is not" in str(caught.value)


def test_an_engine_without_our_loader_is_said_to_be_unproven(served, model_config, monkeypatch):
    info = served.client.server_info() | {"custom_weight_loader": []}
    monkeypatch.setattr(served.client, "server_info", lambda: info)
    receipt = Receipt(model_config, [served.client], "test")
    assert "--custom-weight-loader" in receipt.not_compared[served.client.endpoint.index]
    assert receipt.verify(timeout_s=5) == 0


#: DeepSeek's attention with and without compressed queries (SGLang loads it without CUDA, but cannot compute it there:
#: no log-probs here), experts with a shared one and a bias for choosing, gate and up as one tensor, an output layer
#: that is the embedding.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_SGLANG_READS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
FAMILIES = {
    "deepseek_v3": (2, _SGLANG_READS),
    "moonlight": (1, _SGLANG_READS | {"rope_parameters": _YARN}),
    "glm4_moe": (2, {}),
    "glm4": (2, {"tied": True}),
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("deepseek_v3", "glm4_moe") else pytest.mark.long_run)
        for name in FAMILIES
    ],
)
def test_the_layout_of_other_families(family, tmp_path):
    """An engine that has loaded a folder holds what the folder says, all of it.

    And not what differs in the last bit.
    """
    tp_size, more = FAMILIES[family]
    folder = make_tiny_model(str(tmp_path / family), family, num_layers=2, **more)
    tensors = load_file(f"{folder}/model.safetensors")
    spec = EngineSpec(
        index=tp_size,
        model_path=folder,
        tp_size=tp_size,
        dtype="float32",
        log_path=f"{tmp_path}/log",
        context_length=256,
        extra_flags=FLAGS,
    )
    engine = launch_engine(spec, timeout_s=120)
    try:
        client = EngineClient(engine.endpoint, timeout_s=30)
        receipt = Receipt(model_from_hf(read_hf_config(folder), ModelConfig()), [client], "test")
        client.pause_generation("abort")
        client.begin_weight_update()
        assert dict(receipt.watching(tensors.items())).keys() == tensors.keys()
        assert receipt.unknown == []
        assert receipt.verify(timeout_s=30) == 1
        never_sent(receipt, receipt.parameters(), timeout_s=30, engines={0})
        for name in (name for name in tensors if name.startswith("model.layers.1.")):
            dict(receipt.watching([(name, flip_last_bit(tensors[name].clone()))]))
            with pytest.raises(WeightSyncError, match=f"{re.escape(name)} is not what was sent"):
                receipt.verify(timeout_s=30)
    finally:
        engine.close()
