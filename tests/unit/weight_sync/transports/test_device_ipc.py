"""When an engine may open our GPU's memory; tests/contract/test_engine_weights.py sends real SGLang a handle."""

from __future__ import annotations

import dataclasses

import torch

from slime_like.records import EngineEndpoint
from slime_like.weight_sync.transports.device_ipc import is_possible
from slime_like.weight_sync.transports.registry import PublisherOptions

ENGINE = EngineEndpoint(index=0, url="http://127.0.0.1:1")
OPTIONS = PublisherOptions("ipc", (ENGINE,), 0, 1, 1, 1.0, None, "127.0.0.1")


def test_one_source_and_one_engine_with_cuda():
    assert is_possible(OPTIONS) is torch.cuda.is_available()
    assert not is_possible(dataclasses.replace(OPTIONS, num_sources=2))
    assert not is_possible(dataclasses.replace(OPTIONS, endpoints=(ENGINE, dataclasses.replace(ENGINE, index=1))))
