"""The folder of adapters: one file of what several wrote, as PEFT has it."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.session import version_directory
from slime_like.weight_sync.transports.adapter import AdapterPublisher
from slime_like.weight_sync.transports.registry import PublisherOptions, make_publisher

CONFIG = {"peft_type": "LORA", "r": 4}


def publisher(root, source: int) -> AdapterPublisher:
    options = PublisherOptions("adapter", (), source, 2, 1 << 20, 5.0, str(root), "127.0.0.1", adapter_config=CONFIG)
    publisher_ = make_publisher(options)
    assert isinstance(publisher_, AdapterPublisher)
    return publisher_


def test_stages_write_one_peft_folder(tmp_path):
    first, last = publisher(tmp_path, 0), publisher(tmp_path, 1)
    for version in (1, 2):
        for stage in (first, last):
            stage.begin(version)
        first.send([("a.lora_A.weight", torch.full((2, 3), float(version)))], version)
        last.send([("b.lora_A.weight", torch.ones(2, 2, dtype=torch.bfloat16))], version)
        for stage in (last, first):
            stage.finish(version)
    first.close()
    folder = version_directory(str(tmp_path), 2)
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
    assert torch.equal(tensors["a.lora_A.weight"], torch.full((2, 3), 2.0))
    assert tensors["b.lora_A.weight"].dtype == torch.bfloat16
    with open(os.path.join(folder, "adapter_config.json")) as file:
        assert json.load(file) == CONFIG
    assert os.listdir(tmp_path) == [os.path.basename(folder)]  # older ones are gone


def test_the_same_adapter_twice_is_refused(tmp_path):
    first, last = publisher(tmp_path, 0), publisher(tmp_path, 1)
    for stage in (first, last):
        stage.begin(1)
        stage.send([("a.lora_A.weight", torch.ones(2, 3))], 1)
    with pytest.raises(WeightSyncError, match="a.lora_A.weight was sent twice"):
        first.finish(1)
