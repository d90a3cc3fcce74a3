"""GLM-4.5: Qwen3's attention, with biases, and DeepSeek-V3's experts; the smaller model has no query/key norms."""

from slime_like.megatron_backend.hf.tables import deepseek_v3, qwen2, qwen3

TABLE = (*qwen3.TABLE, *(row for row in qwen2.TABLE if row not in qwen3.TABLE), *deepseek_v3.EXPERTS)
