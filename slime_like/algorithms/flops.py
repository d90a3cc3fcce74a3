"""How much work a sample is for the trainer: floating point operations of one forward pass, from the architecture
alone.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Operations of a forward pass over one sequence of T tokens: linear x T + quadratic x T^2.

    The backward pass takes twice as many (gradients of inputs and of weights), so shares of the whole are the same.
    Example: linear 100, quadratic 2 -> of(10) = 1000 + 200.
    """

    linear: int  # matrices: the same for every token
    quadratic: int  # attention scores: each token looks at those before it

    def of(self, num_tokens: int) -> int:
        """Operations for one sequence."""
        return self.linear * num_tokens + self.quadratic * num_tokens * num_tokens


def forward_flops(model: ModelConfig) -> TokenFlops:
    """Operations per token and per pair of tokens of the whole model (Megatron-LM: arXiv:2104.04473, appendix; PaLM:
    arXiv:2204.02311, appendix B).

    A matrix of a x b costs 2ab a token. Causal attention computes half of the T x T scores: QK^T costs T^2/2 x 2 x
    heads x (channels of a key), the product with the values as much with theirs. Of experts only the chosen ones count.
    Norms, rope and activations, which are no matrix products, are left out, as in both papers.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    matrices = 0
    for has_experts in model.expert_layers:
        matrices += _attention_weights(model) + (
            _expert_weights(model) if has_experts else _mlp_weights(model, model.mlp_size)
        )
    if model.multi_latent_attention:
        channels = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    else:
        channels = 2 * model.head_size
    return TokenFlops(linear=2 * (matrices + hidden * model.vocab_size), quadratic=model.num_layers * heads * channels)


def _attention_weights(model: ModelConfig) -> int:
    """Weights of one layer's projections."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        return hidden * model.head_size * (2 * heads + 2 * model.num_kv_heads)
    key = model.qk_head_dim + model.qk_pos_emb_head_dim
    queries = model.q_lora_rank * (hidden + heads * key) if model.q_lora_rank else hidden * heads * key
    keys_and_values = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + model.kv_lora_rank * heads * (
        model.qk_head_dim + model.v_head_dim
    )
    return queries + keys_and_values + heads * model.v_head_dim * hidden


def _mlp_weights(model: ModelConfig, size: int) -> int:
    return (3 if model.swiglu else 2) * model.hidden_size * size


def _expert_weights(model: ModelConfig) -> int:
    """Weights that one token meets in a layer of experts: the router, the chosen experts and the shared ones."""
    chosen = model.moe_router_topk * _mlp_weights(model, model.moe_ffn_hidden_size or model.mlp_size)
    shared = _mlp_weights(model, model.moe_shared_expert_intermediate_size or 0)
    return model.hidden_size * model.num_experts + chosen + shared
