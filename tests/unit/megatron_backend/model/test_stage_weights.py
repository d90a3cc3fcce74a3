"""Parameters and routers' biases count as weights; other buffers do not."""

from __future__ import annotations

import torch

from slime_like.megatron_backend.model.stage_weights import named_weights


class Stage(torch.nn.Module):
    """layers.0.mlp.router with a weight, a bias for choosing (bf16) and a count of tokens."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].mlp = torch.nn.Module()
        router = self.layers[0].mlp.router = torch.nn.Linear(2, 2, bias=False)
        router.register_buffer("expert_bias", torch.tensor([0.5, -0.5], dtype=torch.bfloat16))
        router.register_buffer("local_tokens_per_expert", torch.zeros(2))


def test_the_bias_for_choosing_is_a_weight_in_fp32():
    stage = Stage()
    weights = dict(named_weights(stage))
    assert list(weights) == ["layers.0.mlp.router.weight", "layers.0.mlp.router.expert_bias"]
    bias = weights["layers.0.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32 and bias.tolist() == [0.5, -0.5]
    bias += 1  # what is given is the stage's own
    assert stage.layers[0].mlp.router.expert_bias.tolist() == [1.5, 0.5]
