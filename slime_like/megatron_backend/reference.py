"""A second set of weights for the same model: kept on the host, swapped in for a forward pass, swapped back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

Weights = dict[str, torch.Tensor]


@torch.no_grad()
def copy_weights(stage: torch.nn.Module) -> Weights:
    """This rank's parameters, copied to host memory."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in stage.named_parameters()}


@torch.no_grad()
def put_weights(stage: torch.nn.Module, weights: Weights) -> None:
    """Overwrite this rank's parameters in place: gradient buffers and optimizer keep pointing at them."""
    for name, parameter in stage.named_parameters():
        parameter.copy_(weights[name])


@contextlib.contextmanager
def swapped(stage: torch.nn.Module, weights: Weights) -> Iterator[None]:
    """Inside, the model computes with `weights`; afterwards, also after an error, with exactly its own again."""
    own = copy_weights(stage)
    put_weights(stage, weights)
    try:
        yield
    finally:
        put_weights(stage, own)
