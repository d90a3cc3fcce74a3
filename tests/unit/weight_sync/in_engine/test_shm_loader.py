"""What the engine's loader does with a request that it does not know: nothing that would end the engine."""

from __future__ import annotations

import logging

import torch

from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.in_engine import shm_loader


def test_the_loaders_name_is_what_the_launcher_passes_on():
    assert f"{shm_loader.__name__}.{shm_loader.load.__name__}" == WEIGHT_LOADER


def test_an_unknown_request_is_logged_and_changes_nothing(caplog):
    model = torch.nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with caplog.at_level(logging.ERROR):
        shm_loader.load(model, [("__tomorrow__", torch.tensor(list(b"{}"), dtype=torch.uint8))])
    assert "does not know the trainer's request __tomorrow__" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
