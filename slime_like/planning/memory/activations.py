"""An estimate of what a forward pass keeps for the backward pass, in bytes per micro-batch and GPU.

A count, tensor by tensor, of what each part of a megatron-core layer saves (the method of arXiv:2205.05198, sec. 4, for
gated MLPs, grouped queries, flash attention, no dropout). With our settings (megatron_backend/model/provider.py), in
which the gated activation is not fused. tests/multiprocess/test_plan_memory.py measures the error of the CPU variant
against real layers; docs/planning.md states it.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig

#: Row statistics (1/rms of a norm, log-sum-exp of attention) are fp32 whatever the weights are.
_STATISTIC = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Bytes per token of one GPU; multiply by the tokens of a micro-batch on that GPU."""

    model: ModelConfig
    parallel: ParallelConfig
    width: int  # bytes of an element: 2 for bf16
    transformer_engine: bool = True  # else torch's own norm and attention, as on a CPU host

    @property
    def _split(self) -> int:
        """Between the matrices, sequence parallelism splits the tokens."""
        return self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1

    def norm(self, channels: float) -> float:
        """What a norm keeps beside its output: transformer-engine its input.

        Torch the input and the normalised input in fp32.
        """
        return self.width * channels + _STATISTIC if self.transformer_engine else 8 * channels + _STATISTIC

    def mlp(self, channels: float) -> float:
        """A gated MLP behind its input: both halves, SiLU of one, a copy of the other, their product."""
        return 5 * self.width * channels

    def attention(self) -> float:
        """From the projection to queries, keys and values up to the input of the output projection."""
        model, tp, width = self.model, self.parallel.tensor_model_parallel_size, self.width
        if model.multi_latent_attention:
            return self._latent_attention()
        queries, keys = model.num_attention_heads * model.head_size / tp, model.num_kv_heads * model.head_size / tp
        heads = (model.num_attention_heads + model.num_kv_heads) / tp
        total = _STATISTIC * model.num_attention_heads / tp
        if model.qk_layernorm:
            total += self.norm(queries) + self.norm(keys) + _STATISTIC * (heads - 2)
        if self.transformer_engine:
            return total + width * (2 * queries + 2 * keys)
        # Keys and values are repeated for each query head, the output is joined to a copy, rope keeps its cosines and
        # sines twice.
        return total + width * (5 * queries + 4 * model.head_size)

    def _latent_attention(self) -> float:
        model, tp, width = self.model, self.parallel.tensor_model_parallel_size, self.width
        queries = model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) / tp
        values = model.num_attention_heads * model.v_head_dim / tp
        total = _STATISTIC * model.num_attention_heads / tp + width * (2 * queries + 2 * values)
        for rank in (model.q_lora_rank or 0, model.kv_lora_rank):
            # The compressed states go into the up projections: normed or not, they are kept once more.
            total += (self.norm(rank) if model.qk_layernorm and rank else 0) + width * rank
        return total if self.transformer_engine else total + width * (values + 4 * model.qk_pos_emb_head_dim)

    def layer(self, *, has_experts: bool) -> float:
        """One decoder layer."""
        model, tp = self.model, self.parallel.tensor_model_parallel_size
        norms = 2 + model.post_self_attn_layernorm + model.post_mlp_layernorm
        around = (norms * self.norm(model.hidden_size) + 2 * self.width * model.hidden_size) / self._split
        if not has_experts:
            return around + self.attention() + self.mlp(model.mlp_size / tp)
        # Each token's copies and their expert channels; evenly routed, each GPU gets as many copies as its own tokens
        # make.
        expert = model.moe_ffn_hidden_size or model.mlp_size
        tokens = model.moe_router_topk * (1 / self._split if self.parallel.expert_tp_size < tp else 1)
        experts = tokens * self.width * (model.hidden_size + 6 * expert / self.parallel.expert_tp_size)
        shared = self.mlp((model.moe_shared_expert_intermediate_size or 0) / tp)
        return around + self.attention() + experts + shared + 3 * model.num_experts / self._split

    def layers(self, stage: int) -> list[float]:
        """Every layer of one pipeline stage."""
        numbers = [layer for chunk in self.parallel.chunks_of_stage(self.model.num_layers, stage) for layer in chunk]
        kinds = {
            has_experts: self.layer(has_experts=has_experts)
            for has_experts in (False, True)
            if has_experts is False or self.model.num_experts
        }
        return [kinds[self.model.expert_layers[layer]] for layer in numbers]

    def stage(self, stage: int) -> float:
        """What one micro-batch keeps on a stage until its backward pass, without recomputing, logits not counted."""
        total = sum(self.layers(stage)) + (8 if stage == 0 else 0)
        if stage == self.parallel.pipeline_model_parallel_size - 1:
            total += (self.norm(self.model.hidden_size) + self.width * self.model.hidden_size) / self._split
        return total

    def kept_bytes(self, stage: int) -> tuple[float, float]:
        """(bytes that every micro-batch in flight keeps, bytes that only the one in its backward pass needs on top)."""
        parallel, layers, whole = self.parallel, self.layers(stage), self.stage(stage)
        boundary = self.width * self.model.hidden_size / self._split
        largest = max(layers, default=0.0)
        # Gradients of the layer that is just worked on: of its input and of the widest part inside.
        working = 2 * boundary + 3 * self.width * self._widest()
        if parallel.recompute_granularity != "full":
            heads = self.model.num_attention_heads / parallel.tensor_model_parallel_size
            saved = _STATISTIC * heads * len(layers) if parallel.recompute_granularity == "selective" else 0.0
            return whole - saved, working
        # The rotation angles in fp32, one set for all recomputed layers.
        rotated = self.model.qk_pos_emb_head_dim if self.model.multi_latent_attention else self.model.head_size
        whole += 4 * rotated
        chunk = parallel.recompute_num_layers or 1
        if parallel.recompute_method == "block":
            again = min(chunk, len(layers))
            return whole - sum(layers[:again]) + again * boundary, working + (largest if again else 0.0)
        return whole - sum(layers) + -(-len(layers) // chunk) * boundary, working + largest * min(chunk, len(layers))

    def forward_only(self) -> float:
        """Most that is alive at once when only log-probs are computed: one layer's residual, input, and its widest
        part.
        """
        return self.width * (3 * self.model.hidden_size / self._split + 4 * self._widest())

    def logits(self, tokens: int, *, chunk_tokens: int | None) -> float:
        """Most bytes that are alive at once around `tokens` tokens' logits on the last stage, with our loss
        (megatron_backend/step/forward.py).

        The logits, whose place their gradient takes; for a chunk of the tokens, two fp32 tensors of that size: the
        scaled logits and their probabilities.
        """
        tp = self.parallel.tensor_model_parallel_size
        chunk = min(tokens, chunk_tokens or tokens)
        return self.model.padded_vocab_size(tp) / tp * (tokens * self.width + chunk * 4 * 2)

    def _widest(self) -> float:
        model, tp = self.model, self.parallel.tensor_model_parallel_size
        dense = 0.0 if all(model.expert_layers) else model.mlp_size / tp
        if not model.num_experts:
            return dense
        return max(
            dense, model.moe_router_topk * (model.moe_ffn_hidden_size or model.mlp_size) / self.parallel.expert_tp_size
        )
