"""The architecture and how it is split over GPUs. Flag names are Megatron's."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture (Megatron's names; all of it comes from --hf-checkpoint when --num-layers is not given)"""

    num_layers: int | None = flag(None, help="Transformer layers. Without it, the architecture is read from --hf-checkpoint.")
    hidden_size: int | None = flag(None, help="Width of the residual stream.")
    ffn_hidden_size: int | None = flag(None, help="Width inside the MLP. Default: 4 x hidden size.")
    num_attention_heads: int | None = flag(None, help="Query heads.")
    group_query_attention: bool = flag(False, help="Use --num-query-groups key/value heads instead of one per query head.")
    num_query_groups: int | None = flag(None, help="Key/value heads, with --group-query-attention.")
    kv_channels: int | None = flag(None, help="Size of one head. Default: hidden size / heads.")
    vocab_size: int | None = flag(None, help="Rows of the embedding in the HF checkpoint.")
    make_vocab_size_divisible_by: int = flag(1, help="Pad the embedding to a multiple of this times the tensor parallel size.")
    max_position_embeddings: int | None = flag(None, help="Longest sequence the model takes. Default: from the HF checkpoint, else 32768.")
    normalization: str = flag("LayerNorm", choices=("RMSNorm", "LayerNorm"), help="Norm of every layer; the supported families use RMSNorm.")
    norm_epsilon: float = flag(1e-5, help="Epsilon of the norms.")
    swiglu: bool = flag(False, help="Gated MLP with SiLU.")
    disable_bias_linear: bool = flag(False, help="No bias in the linear layers.")
    add_qkv_bias: bool = flag(False, help="Bias in the query/key/value projection only (Qwen2).")
    qk_layernorm: bool = flag(False, help="Norm on each query and key head (Qwen3).")
    untie_embeddings_and_output_weights: bool = flag(False, help="Separate output layer instead of the embedding.")
    position_embedding_type: str = flag("rope", choices=("rope",), help="Position encoding.")
    use_rotary_position_embeddings: bool = flag(True, help="Deprecated spelling of --position-embedding-type rope.")
    rotary_base: float = flag(10000.0, help="Rope base (theta).")
    rotary_percent: float = flag(1.0, help="Share of each head that is rotated.")
    use_rope_scaling: bool = flag(False, help="Llama 3 rope scaling.")
    rope_scaling_factor: float = flag(8.0, help="Factor of --use-rope-scaling.")
    attention_dropout: float = flag(0.0, help="Must be 0: log-probs of a policy must be reproducible.")
    hidden_dropout: float = flag(0.0, help="Must be 0, as --attention-dropout.")
    attention_softmax_in_fp32: bool = flag(True, help="Attention softmax in fp32 (our attention always does).")
    attention_backend: str = flag(
        "auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
        help="Transformer-engine attention; on a CPU host torch SDPA is used and this is only noted.",
    )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, whether grouped or not."""
        return self.num_query_groups if self.group_query_attention and self.num_query_groups else self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def mlp_size(self) -> int:
        """Channels inside the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model takes."""
        return self.max_position_embeddings or 32768

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Embedding rows in the trainer; rows past vocab_size never receive probability."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    def problems(self) -> list[str]:
        """What is impossible about the architecture by itself."""
        found = []
        for name in ("hidden_size", "num_attention_heads", "vocab_size"):
            if not getattr(self, name):
                found.append(
                    f"the architecture is incomplete: --{name.replace('_', '-')} is missing. Fix: give it, or leave out --num-layers and give --hf-checkpoint."
                )
        if found:
            return found
        if self.group_query_attention and not self.num_query_groups:
            found.append("--group-query-attention needs --num-query-groups.")
        elif self.num_attention_heads % self.num_kv_heads:
            found.append(f"{self.num_attention_heads} heads do not divide into {self.num_kv_heads} groups: --num-attention-heads, --num-query-groups.")
        if not self.kv_channels and self.hidden_size % self.num_attention_heads:
            found.append(f"hidden size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads. Fix: give --kv-channels.")
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name):
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)} is not supported: a policy's log-probs must be reproducible. Fix: 0.")
        if not self.swiglu:
            found.append("only gated SiLU models are supported (Qwen2, Qwen3, Llama). Fix: --swiglu.")
        if self.normalization != "RMSNorm":
            found.append("only RMSNorm models are supported (Qwen2, Qwen3, Llama). Fix: --normalization RMSNorm.")
        if not self.disable_bias_linear:
            found.append("only models without linear biases are supported. Fix: --disable-bias-linear (and --add-qkv-bias for Qwen2).")
        if not self.use_rotary_position_embeddings:
            found.append("--no-use-rotary-position-embeddings: the supported families all use rope.")
        if self.rotary_percent != 1.0:
            found.append(f"--rotary-percent {self.rotary_percent}: the supported families rotate whole heads. Fix: 1.0.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the trainer is split over GPUs (Megatron's names)"""

    tensor_model_parallel_size: int = flag(1, help="GPUs that share each layer's matrices.")
    pipeline_model_parallel_size: int = flag(1, help="GPUs that share the layers.")
    context_parallel_size: int = flag(1, help="GPUs that share one sequence. Only 1 so far.")
    expert_model_parallel_size: int = flag(1, help="GPUs that share the experts. Only 1 so far (dense models).")
    expert_tensor_parallel_size: int = flag(1, help="Tensor parallel size inside the experts. Only 1 so far.")
    sequence_parallel: bool = flag(False, help="Split activations over the tensor parallel GPUs between the matrices.")
    use_distributed_optimizer: bool = flag(True, help="Split optimizer state over data parallel ranks.")
    distributed_timeout_minutes: int = flag(10, help="Deadline of a collective.")
    train_timeout_s: float = flag(3600.0, help="Deadline for the trainer to answer: training on one rollout, or saving, in seconds.")

    @property
    def model_parallel_size(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def problems(self, model: ModelConfig) -> list[str]:
        """What is impossible about the split."""
        found = []
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for name in ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) != 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)} is not supported yet. Fix: 1.")
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if found or model.num_layers is None:
            return found
        for what, count in (("query heads", model.num_attention_heads), ("key/value heads", model.num_kv_heads), ("MLP channels", model.mlp_size)):
            if count % tensor:
                found.append(f"{count} {what} do not divide by --tensor-model-parallel-size {tensor}.")
        if model.num_layers % pipeline:
            found.append(f"{model.num_layers} layers do not divide by --pipeline-model-parallel-size {pipeline}.")
        if self.sequence_parallel and tensor == 1:
            found.append("--sequence-parallel needs --tensor-model-parallel-size above 1.")
        return found
