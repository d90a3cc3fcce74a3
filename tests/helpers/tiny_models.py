"""Random tiny HF checkpoints of each family, small enough for any test and shaped so that a mixed-up dimension shows.

hidden != ffn != heads x head size, grouped queries, a vocabulary that tensor parallel sizes do not divide.
"""

from __future__ import annotations

import json
import os

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
#: Four experts, two a token, whose weights are divided by their sum as in public checkpoints.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1}
VOCAB_SIZE = 101


def make_tiny_model(folder: str, family: str, *, seed: int = 0, tied: bool = False, num_layers: int = 4, vocab_size: int = VOCAB_SIZE, **overrides) -> str:
    """Write config.json and model.safetensors of a random fp32 model into `folder`; returns the folder.

    family: llama, qwen2, qwen3 or qwen3_moe. Norms and biases are random too, so that a forgotten one shows.
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": num_layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    if family != "qwen2":  # Qwen2 has no head_dim of its own
        sizes["head_dim"] = 16
    if family == "qwen3_moe":
        sizes |= EXPERTS
    config = CONFIGS[family](**(sizes | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    _check_written(folder)
    return folder


def _check_written(folder: str) -> None:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        assert json.load(file)["architectures"], "transformers wrote no architecture"
