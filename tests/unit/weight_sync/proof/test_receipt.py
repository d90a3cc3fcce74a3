"""Engines whose digests can be compared, and what is asked of them.

tests/contract/test_receipts.py compares with real SGLang.
"""

from __future__ import annotations

import base64
import pickle
import re

import pytest
from sglang_backend.fake_http import serve

from slime_like.config.model import ModelConfig
from slime_like.config.quantisation import SCHEMES, engine_flags
from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.proof.receipt import EngineLayout, Receipt, layout_of, loader_request

OURS = {"custom_weight_loader": [WEIGHT_LOADER], "device": "cpu"}
MODEL = ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=6, vocab_size=8)


def layout(info: dict, tp_size: int = 1, scheme=None) -> EngineLayout | str:
    with serve({"/get_server_info": (200, info), "/server_info": (200, info)}) as server:
        return layout_of(EngineClient(EngineEndpoint(index=0, url=server.url, tp_size=tp_size)), scheme)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (OURS, EngineLayout(tp_size=2, on_cpu=True, may_fuse_shared=False)),
        (OURS | {"device": "cuda"}, EngineLayout(tp_size=2, on_cpu=False, may_fuse_shared=True)),
        (
            OURS | {"device": "cuda", "disable_shared_experts_fusion": True},
            EngineLayout(tp_size=2, on_cpu=False, may_fuse_shared=False),
        ),
        (OURS | {"ep_size": 1, "pp_size": 1}, EngineLayout(tp_size=2, on_cpu=True, may_fuse_shared=False)),
    ],
)
def test_layouts_that_are_known(info: dict, expected: EngineLayout):
    assert layout(info, tp_size=2) == expected


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"device": "cpu"}, "it was started without --custom-weight-loader"),
        (OURS | {"quantization": "fp8"}, r"it keeps quantised weights \(fp8\)"),
        (OURS | {"ep_size": 2}, "its layout with ep_size 2 is not known here"),
        (OURS | {"enable_dp_attention": True}, "its layout with enable_dp_attention True is not known here"),
    ],
)
def test_layouts_that_are_not(info: dict, reason: str):
    assert re.match(reason, layout(info))


def test_each_rank_gets_its_own_bytes():
    for text, data in zip(loader_request("__name__", [b"{}", b"[1]"]), [b"{}", b"[1]"], strict=True):
        ((name, tensor),) = pickle.loads(base64.b64decode(text))
        assert name == "__name__" and bytes(tensor.numpy()) == data


def test_an_engine_that_cannot_be_compared_is_listed_with_its_reason():
    info = {"device": "cpu"}
    with serve({"/get_server_info": (200, info), "/server_info": (200, info)}) as server:
        receipt = Receipt(MODEL, [EngineClient(EngineEndpoint(index=3, url=server.url))], "source 0")
        assert list(receipt.not_compared) == [3] and list(receipt.engines()) == [] and receipt.layout_number(3) is None
        assert "--custom-weight-loader" in receipt.not_compared[3]
        assert receipt.verify(1.0) == 0


@pytest.mark.parametrize(("name", "block"), [("int8", 1), ("fp8", 128), ("fp8-per-tensor", 128)])
def test_an_engine_of_the_scheme_that_is_sent_is_known(name, block):
    scheme, info = SCHEMES[name], OURS | engine_flags(SCHEMES[name], {})
    assert layout(info, scheme=scheme) == EngineLayout(tp_size=1, on_cpu=True, block=block)
    assert layout(info).startswith("it keeps quantised weights (")  # of whatever is sent without it


@pytest.mark.parametrize(
    "info",
    [OURS, OURS | engine_flags(SCHEMES["fp8"], {}), OURS | engine_flags(SCHEMES["int8"], {}) | {"ep_size": 2}],
)
def test_one_that_starts_with_made_up_weights_must_be_proven(info):
    with serve({"/get_server_info": (200, info), "/server_info": (200, info)}) as server:
        client = EngineClient(EngineEndpoint(index=3, url=server.url))
        with pytest.raises(WeightSyncError, match="engine 3 at .* cannot be shown to hold weights in int8: it"):
            Receipt(MODEL, [client], "source 0", scheme=SCHEMES["int8"])
