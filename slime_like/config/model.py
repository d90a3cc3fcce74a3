"""The architecture and how it is split over GPUs. Flag names are Megatron's."""

from __future__ import annotations

import dataclasses
import re

from slime_like.config.base import flag


def parse_layer_pattern(text: str, num_layers: int) -> list[bool]:
    """Megatron's layer pattern: "2" (layers 0, 2, 4 …) or a list of 0 and 1 written as [0]*3+[1]*75, [0,0,1]. Raises ValueError."""
    text = text.strip(" '\"").replace(" ", "")
    if text.isdigit():
        every = int(text)
        if every < 1:
            raise ValueError(f"{text!r}: must be at least 1")
        return [layer % every == 0 for layer in range(num_layers)]
    pattern: list[bool] = []
    for part in re.split(r"\+(?=\()|\+(?=\[)", text.strip("()") if text.startswith("([") and text.count("(") == 1 else text):
        match = re.fullmatch(r"\(?\[((?:[01],?)+)\](?:\*(\d+))?\)?", part)
        if not match:
            raise ValueError(f"{text!r}: {part!r} is no list of 0 and 1, like [0]*3+[1]*75")
        pattern += [digit == "1" for digit in match[1].strip(",").split(",")] * int(match[2] or 1)
    if len(pattern) != num_layers:
        raise ValueError(f"{text!r} describes {len(pattern)} layers, the model has {num_layers}")
    return pattern


#: Sizes that only multi-latent attention has.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor", "mscale", "mscale_all_dim")


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
    position_embedding: bool = flag(False, help="Learned positions beside rope; no supported family has them.")
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

    rope_fusion: bool = flag(False, help="Fused rope kernel; never used, so that every host computes the same numbers.")
    masked_softmax_fusion: bool = flag(False, help="Fused softmax kernel; never used, as --rope-fusion.")
    rotary_interleaved: bool = flag(False, help="Rotate neighbouring channels instead of halves (GLM-4).")
    rotary_scaling_factor: float = flag(1.0, help="Yarn factor of multi-latent attention.")
    post_self_attn_layernorm: bool = flag(False, help="Another norm after attention (GLM-4).")
    post_mlp_layernorm: bool = flag(False, help="Another norm after the MLP (GLM-4).")
    multi_latent_attention: bool = flag(False, help="Attention with compressed keys and values (DeepSeek).")
    q_lora_rank: int | None = flag(None, help="Width of compressed queries; without it they are not compressed.")
    kv_lora_rank: int = flag(512, help="Width of compressed keys and values.")
    qk_head_dim: int = flag(128, help="Channels of a query/key head without position.")
    qk_pos_emb_head_dim: int = flag(64, help="Channels of a query/key head that are rotated.")
    v_head_dim: int = flag(128, help="Channels of a value head.")
    mscale: float = flag(1.0, help="Yarn attention scale.")
    mscale_all_dim: float = flag(0.0, help="Yarn attention scale on all channels.")
    num_experts: int | None = flag(None, help="Experts of each mixture-of-experts layer.")
    moe_layer_freq: str = flag("1", help="Which layers have experts: N (every Nth), or a list such as [0]*3+[1]*75.")
    moe_ffn_hidden_size: int | None = flag(None, help="Width inside one expert. Default: --ffn-hidden-size.")
    moe_shared_expert_intermediate_size: int | None = flag(None, help="Width of all shared experts together; without it there are none.")
    moe_shared_expert_gate: bool = flag(False, help="Gate on the shared expert's output.")
    moe_router_topk: int = flag(2, help="Experts per token.")
    moe_router_score_function: str = flag("softmax", choices=("softmax", "sigmoid"), help="How router logits become scores.")
    moe_router_pre_softmax: bool = flag(False, help="Softmax before the top k instead of after.")
    moe_router_enable_expert_bias: bool = flag(False, help="A bias per expert for choosing, without auxiliary loss.")
    moe_router_bias_update_rate: float = flag(1e-3, help="Step of that bias.")
    moe_router_load_balancing_type: str = flag("aux_loss", choices=("none", "aux_loss", "seq_aux_loss"), help="Balancing of the experts.")
    moe_aux_loss_coeff: float = flag(0.0, help="Weight of the auxiliary loss.")
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), help="Precision of the router.")
    moe_router_topk_scaling_factor: float | None = flag(None, help="Factor on the chosen scores.")
    moe_router_num_groups: int | None = flag(None, help="Groups of experts, for group-limited routing.")
    moe_router_group_topk: int | None = flag(None, help="Groups a token may go to.")
    moe_token_dispatcher_type: str = flag("alltoall", choices=("allgather", "alltoall", "flex"), help="How tokens reach their experts.")
    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"), help="Which tokens a full expert drops; experts have no limit here.")
    moe_grouped_gemm: bool = flag(False, help="One kernel for all experts of a GPU.")
    moe_permute_fusion: bool = flag(False, help="Fused token permutation.")
    moe_enable_deepep: bool = flag(False, help="DeepEP communication, with the flex dispatcher.")

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts. Raises ValueError if --moe-layer-freq makes no sense."""
        if not self.num_experts:
            return (False,) * self.num_layers
        pattern = parse_layer_pattern(self.moe_layer_freq, self.num_layers)
        return tuple(pattern)

    @property
    def is_qwen3_moe(self) -> bool:
        """Whether the experts are built as Qwen3-MoE's: in every layer, a plain softmax router, none shared."""
        others = (
            self.moe_shared_expert_intermediate_size,
            self.moe_shared_expert_gate,
            self.moe_router_enable_expert_bias,
            self.moe_router_num_groups,
            self.moe_router_group_topk,
            self.add_qkv_bias,
            self.multi_latent_attention,
            self.moe_router_topk_scaling_factor not in (None, 1.0),
        )
        return bool(self.num_experts and self.qk_layernorm and self.moe_router_score_function == "softmax" and all(self.expert_layers)) and not any(others)

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
        if not 0 < self.rotary_percent <= 1.0:
            found.append(f"--rotary-percent {self.rotary_percent}: must be in (0, 1].")
        for name in ("position_embedding", "rope_fusion", "masked_softmax_fusion"):
            if getattr(self, name):
                found.append(f"--{name.replace('_', '-')} is not supported. Fix: leave it out.")
        if self.multi_latent_attention and self.group_query_attention:
            found.append("--multi-latent-attention and --group-query-attention exclude each other. Fix: drop one.")
        for needed, given, names in (
            ("--num-experts", self.num_experts, [field.name for field in dataclasses.fields(self) if field.name.startswith("moe_")]),
            ("--multi-latent-attention", self.multi_latent_attention, _LATENT),
        ):
            idle = [] if given else [name for name in names if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            found += [f"--{name.replace('_', '-')} {getattr(self, name)} does nothing without {needed}. Fix: add it, or drop this." for name in idle]
        return found + (self._expert_problems() if self.num_experts else [])

    def _expert_problems(self) -> list[str]:
        found = []
        if self.moe_router_bias_update_rate not in (0, ModelConfig.moe_router_bias_update_rate) and not self.moe_router_enable_expert_bias:
            rate = self.moe_router_bias_update_rate
            found.append(f"--moe-router-bias-update-rate {rate} does nothing without --moe-router-enable-expert-bias. Fix: add it, or drop this.")
        if not 0 < self.moe_router_topk <= self.num_experts:
            found.append(f"--moe-router-topk {self.moe_router_topk}: must be from 1 to --num-experts {self.num_experts}.")
        if self.moe_router_topk == 1 and self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax:
            found.append("--moe-router-topk 1: a softmax over one chosen expert is always 1, so the router would not learn. Fix: --moe-router-pre-softmax.")
        try:
            self.expert_layers  # noqa: B018  (raises)
        except ValueError as error:
            found.append(f"--moe-layer-freq {error}.")
        if self.moe_enable_deepep and self.moe_token_dispatcher_type != "flex":
            found.append(f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, not {self.moe_token_dispatcher_type}.")
        if self.moe_router_num_groups and (self.num_experts % self.moe_router_num_groups or not self.moe_router_group_topk):
            found.append(
                f"--moe-router-num-groups {self.moe_router_num_groups}: must divide --num-experts {self.num_experts} and needs --moe-router-group-topk."
            )
        return found


#: Sizes and counts that must be at least 1 where given.
_COUNTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "recompute_num_layers",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the trainer is split over GPUs (Megatron's names)"""

    tensor_model_parallel_size: int = flag(1, help="GPUs that share each layer's matrices.")
    pipeline_model_parallel_size: int = flag(1, help="GPUs that share the layers.")
    decoder_first_pipeline_num_layers: int | None = flag(None, help="Layers of the first pipeline stage. Default: as many as the others have.")
    decoder_last_pipeline_num_layers: int | None = flag(None, help="Layers of the last pipeline stage. Default: as many as the others have.")
    context_parallel_size: int = flag(1, help="GPUs that share one sequence.")
    expert_model_parallel_size: int = flag(1, help="GPUs that share the experts.")
    expert_tensor_parallel_size: int | None = flag(None, help="Tensor parallel size inside the experts. Default: --tensor-model-parallel-size.")
    sequence_parallel: bool = flag(False, help="Split activations over the tensor parallel GPUs between the matrices.")
    use_distributed_optimizer: bool = flag(True, help="Split optimizer state over data parallel ranks.")
    overlap_grad_reduce: bool = flag(False, help="Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool = flag(False, help="Gather weights while the forward pass already runs; with --overlap-grad-reduce.")
    recompute_granularity: str | None = flag(
        None, choices=("full", "selective"), help="Compute activations again in the backward pass: of whole layers, or of attention only."
    )
    recompute_method: str | None = flag(None, choices=("uniform", "block"), help="With full: all layers in chunks, or only the first of each stage.")
    recompute_num_layers: int | None = flag(None, help="With full: layers of a chunk (uniform), or layers recomputed per stage (block).")
    distributed_timeout_minutes: int = flag(10, help="Deadline of a collective.")
    train_timeout_s: float = flag(3600.0, help="Deadline for the trainer to answer: training on one rollout, or saving, in seconds.")

    @property
    def model_parallel_size(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tp_size(self) -> int:
        """Tensor parallel size inside the experts."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_parallel_block(self) -> int:
        """GPUs that hold one copy of the experts of every stage: expert tensor x expert x pipeline parallel size."""
        return self.expert_tp_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage; the sum is num_layers. Raises ValueError if they cannot be dealt out.

        Megatron's rule (transformer_block.get_num_layers_to_build): what the first and last stage do not take by their flags
        is dealt out evenly to the other stages.
        Example: 61 layers, 4 stages, 13 in the last -> [16, 16, 16, 13].
        """
        stages = self.pipeline_model_parallel_size
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if stages == 1:
            if any(given not in (None, num_layers) for given in (first, last)):
                raise ValueError(
                    f"one pipeline stage has all {num_layers} layers: drop --decoder-first-pipeline-num-layers and "
                    "--decoder-last-pipeline-num-layers, or raise --pipeline-model-parallel-size"
                )
            return [num_layers]
        left, middle = num_layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
        flags = (
            f"--pipeline-model-parallel-size {stages}"
            + (f", --decoder-first-pipeline-num-layers {first}" if first is not None else "")
            + (f", --decoder-last-pipeline-num-layers {last}" if last is not None else "")
        )
        if left < middle or left % max(middle, 1) or (not middle and left):
            if first is None and last is None:
                raise ValueError(
                    f"{num_layers} layers do not divide by {flags}. Fix: another size, or give the last stage fewer or more layers with "
                    "--decoder-last-pipeline-num-layers"
                )
            raise ValueError(f"{num_layers} layers leave {left} for {middle} stages between the given ones, which is not an equal number each: {flags}")
        even = left // middle if middle else 0
        counts = [even] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts

    def problems(self, model: ModelConfig) -> list[str]:
        """What is impossible about the split."""
        found = []
        tensor = self.tensor_model_parallel_size
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        found += self._recompute_problems()
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.use_distributed_optimizer):
            found.append("--overlap-param-gather needs --overlap-grad-reduce and --use-distributed-optimizer.")
        if found or model.num_layers is None:
            return found
        for what, count in (("query heads", model.num_attention_heads), ("key/value heads", model.num_kv_heads), ("MLP channels", model.mlp_size)):
            if count % tensor:
                found.append(f"{count} {what} do not divide by --tensor-model-parallel-size {tensor}.")
        try:
            self.layers_per_stage(model.num_layers)
        except ValueError as error:
            found.append(f"{error}.")
        return found + self._expert_problems(model)

    def _recompute_problems(self) -> list[str]:
        if self.recompute_granularity == "full" and not (self.recompute_method and self.recompute_num_layers):
            return ["--recompute-granularity full needs --recompute-method and --recompute-num-layers. Fix: uniform and 1 save the most memory."]
        if self.recompute_granularity != "full" and (self.recompute_method or self.recompute_num_layers):
            return ["--recompute-method and --recompute-num-layers are for --recompute-granularity full. Fix: give that, or drop them."]
        return []

    def _expert_problems(self, model: ModelConfig) -> list[str]:
        experts, size = model.num_experts, self.expert_model_parallel_size
        if not experts:
            sizes = {"--expert-model-parallel-size": size, "--expert-tensor-parallel-size": self.expert_tensor_parallel_size or 1}
            return [f"{name} {given} needs a model with experts (--num-experts). Fix: 1." for name, given in sizes.items() if given > 1]
        found = []
        if experts % size:
            found.append(f"{experts} experts do not divide by --expert-model-parallel-size {size}.")
        for flag_name, channels in (
            ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size or model.mlp_size),
            ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size or 0),
        ):
            tensor = self.tensor_model_parallel_size if "shared" in flag_name else self.expert_tp_size
            if channels % tensor:
                found.append(f"{flag_name} {channels} does not divide by the tensor parallel size {tensor} of the experts.")
        if self.expert_tp_size > 1 and self.tensor_model_parallel_size == 1:
            found.append(f"--expert-tensor-parallel-size {self.expert_tp_size} needs --tensor-model-parallel-size above 1.")
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            found.append("experts with --tensor-model-parallel-size above 1 need --sequence-parallel (Megatron refuses it otherwise).")
        return found
