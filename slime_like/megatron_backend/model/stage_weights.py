"""Everything of one pipeline stage that counts as the model's weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BIAS = ".mlp.router.expert_bias"


def named_weights(stage: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, and of every router's bias for choosing experts: a buffer, learnt without
    gradients.

    The bias is kept in fp32, as the router itself does from its first forward pass on: its steps are too small for
    bf16.
    """
    yield from stage.named_parameters()
    for name, buffer in stage.named_buffers():
        if name.endswith(_BIAS):
            if buffer.dtype != torch.float32:
                buffer.data = buffer.data.to(torch.float32)
            yield name, buffer
