"""Architectures and configs for tests of the plan."""

from __future__ import annotations

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig

COMMON = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 8}
LLAMA_70B = ModelConfig(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    vocab_size=128256,
    **COMMON,
    **GROUPED,
)
QWEN3_8B = ModelConfig(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    kv_channels=128,
    qk_layernorm=True,
    vocab_size=151936,
    **COMMON,
    **GROUPED,
)
DEEPSEEK_V3 = ModelConfig(
    num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128, vocab_size=129280, **COMMON,
    multi_latent_attention=True,
    q_lora_rank=1536, qk_layernorm=True, num_experts=256, moe_ffn_hidden_size=2048, moe_layer_freq="[0]*3+[1]*58",
    moe_shared_expert_intermediate_size=2048,
)  # fmt: skip
TINY = ModelConfig(num_layers=3, hidden_size=8, ffn_hidden_size=10, num_attention_heads=2, vocab_size=11, **COMMON)

_GROUPS = {
    "parallel": ParallelConfig, "rollout": RolloutConfig, "placement": PlacementConfig, "sync": SyncConfig,
    "batch": BatchConfig,
    "checkpoint": CheckpointConfig, "loss": LossConfig,
}  # fmt: skip


def plan_config(
    model: ModelConfig, *, sglang: dict | None = None, optimizer: dict | None = None, **groups: dict
) -> RunConfig:
    """A bf16 run of `model`; `groups` are the flags of a group: placement={"colocate": True}."""
    config_groups = {name: _GROUPS[name](**flags) for name, flags in groups.items()}
    return RunConfig(
        model=model,
        engine=EngineConfig(sglang=sglang or {}),
        optimizer=OptimizerConfig(**({"bf16": True} | (optimizer or {}))),
        **config_groups,
    )
