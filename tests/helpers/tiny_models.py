"""Random tiny HF checkpoints of each family, small enough for any test and shaped so that a mixed-up dimension shows.

hidden != ffn != heads x head size, grouped queries, a vocabulary that tensor parallel sizes do not divide.
"""

from __future__ import annotations

import json
import os

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "deepseek_v3": DeepseekV3Config,
    "moonlight": DeepseekV3Config,
}
#: Four experts, two a token, whose weights are divided by their sum as in public checkpoints.
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
#: Experts of GLM-4.5 and DeepSeek-V3: behind one dense layer, two of eight a token, one shared.
_SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_SIGMOID_EXPERTS |= {
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
#: Frequencies of all three kinds: left, between, stretched.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}
_YARN |= {"beta_fast": 4.0, "beta_slow": 1.0}
#: What a family needs beside the common sizes. Moonlight: DeepSeek-V3 without compressed queries, yarn and groups, with
#: two shared experts.
_MORE: dict[str, dict] = {
    "qwen3_moe": EXPERTS,
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": None},
    "glm4_moe": _SIGMOID_EXPERTS | {"attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "deepseek_v3": _SIGMOID_EXPERTS
    | _LATENT
    | {"q_lora_rank": 20, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN},
    "moonlight": _SIGMOID_EXPERTS
    | _LATENT
    | {"q_lora_rank": None, "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.446},
}
VOCAB_SIZE = 101


def make_tiny_model(
    folder: str,
    family: str,
    *,
    seed: int = 0,
    tied: bool = False,
    num_layers: int = 4,
    vocab_size: int = VOCAB_SIZE,
    **overrides,
) -> str:
    """Write config.json and model.safetensors of a random fp32 model into `folder`; returns the folder.

    family: one of CONFIGS. Norms and biases, and routers' biases for choosing, are random too, so that a forgotten one
    shows.
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": num_layers}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    if family not in ("qwen2", "deepseek_v3", "moonlight"):  # these have no head_dim of their own
        sizes["head_dim"] = 16
    config = CONFIGS[family](**(sizes | _MORE.get(family, {}) | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    _check_written(folder)
    return folder


def _check_written(folder: str) -> None:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        assert json.load(file)["architectures"], "transformers wrote no architecture"
