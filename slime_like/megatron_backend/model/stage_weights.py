"""Everything of one pipeline stage that counts as the model's weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BIAS = ".mlp.router.expert_bias"
#: The name under which a linear layer holds its adapter.
ADAPTER = "adapter"


def is_adapters(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter (lora/), not to the model itself."""
    return f".{ADAPTER}." in name


def named_weights(stage: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter but adapters', and of every router's bias for choosing experts: a buffer,
    learnt without gradients.

    The bias is kept in fp32, as the router itself does from its first forward pass on: its steps are too small for
    bf16.
    """
    yield from ((name, weight) for name, weight in stage.named_parameters() if not is_adapters(name))
    for name, buffer in stage.named_buffers():
        if name.endswith(_BIAS):
            if buffer.dtype != torch.float32:
                buffer.data = buffer.data.to(torch.float32)
            yield name, buffer
