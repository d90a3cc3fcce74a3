"""The architecture of the model. Flag names are Megatron's."""

from __future__ import annotations

import dataclasses
import re

from slime_like.config.base import flag
from slime_like.config.parallel import ParallelConfig

__all__ = ["ModelConfig", "ParallelConfig", "parse_layer_pattern"]


def parse_layer_pattern(text: str, num_layers: int) -> list[bool]:
    """Megatron's layer pattern: "2" (layers 0, 2, 4 …) or a list of 0 and 1 written as [0]*3+[1]*75, [0,0,1].

    Raises ValueError.
    """
    text = text.strip(" '\"").replace(" ", "")
    if text.isdigit():
        every = int(text)
        if every < 1:
            raise ValueError(f"{text!r}: must be at least 1")
        return [layer % every == 0 for layer in range(num_layers)]
    pattern: list[bool] = []
    for part in re.split(
        r"\+(?=\()|\+(?=\[)", text.strip("()") if text.startswith("([") and text.count("(") == 1 else text
    ):
        match = re.fullmatch(r"\(?\[((?:[01],?)+)\](?:\*(\d+))?\)?", part)
        if not match:
            raise ValueError(f"{text!r}: {part!r} is no list of 0 and 1, like [0]*3+[1]*75")
        pattern += [digit == "1" for digit in match[1].strip(",").split(",")] * int(match[2] or 1)
    if len(pattern) != num_layers:
        raise ValueError(f"{text!r} describes {len(pattern)} layers, the model has {num_layers}")
    return pattern


#: Sizes that only multi-latent attention has.
_LATENT = (
    *(
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rotary_scaling_factor",
        "mscale",
        "mscale_all_dim",
    ),
    *("original_max_position_embeddings", "beta_fast", "beta_slow"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture (Megatron's names; all of it comes from --hf-checkpoint when --num-layers is not given)"""

    num_layers: int = flag(
        0, help="Transformer layers. 0: the architecture is read from --hf-checkpoint.", least=0, most=10_000
    )
    hidden_size: int = flag(0, help="Width of the residual stream.", least=0)
    ffn_hidden_size: int | None = flag(None, help="Width inside the MLP. Default: 4 x hidden size.", least=1)
    num_attention_heads: int = flag(0, help="Query heads.", least=0)
    group_query_attention: bool = flag(
        False, help="Use --num-query-groups key/value heads instead of one per query head."
    )
    num_query_groups: int | None = flag(None, help="Key/value heads, with --group-query-attention.", least=1)
    kv_channels: int | None = flag(None, help="Size of one head. Default: hidden size / heads.", least=1)
    vocab_size: int = flag(0, help="Rows of the embedding in the HF checkpoint.", least=0)
    make_vocab_size_divisible_by: int = flag(
        1,
        help="Pad the embedding to a multiple of this times the tensor parallel size.",
        least=1,
    )
    max_position_embeddings: int | None = flag(
        None,
        help="Longest sequence the model takes. Default: from the HF checkpoint, else 32768.",
        least=1,
    )
    normalization: str = flag(
        "LayerNorm", choices=("RMSNorm", "LayerNorm"), help="Norm of every layer; the supported families use RMSNorm."
    )
    norm_epsilon: float = flag(1e-5, help="Epsilon of the norms.", above=0, below=1)
    swiglu: bool = flag(False, help="Gated MLP with SiLU.")
    disable_bias_linear: bool = flag(False, help="No bias in the linear layers.")
    add_qkv_bias: bool = flag(False, help="Bias in the query/key/value projection only (Qwen2).")
    qk_layernorm: bool = flag(False, help="Norm on each query and key head (Qwen3).")
    untie_embeddings_and_output_weights: bool = flag(False, help="Separate output layer instead of the embedding.")
    position_embedding_type: str = flag("rope", choices=("rope",), help="Position encoding.")
    use_rotary_position_embeddings: bool = flag(True, help="Deprecated spelling of --position-embedding-type rope.")
    position_embedding: bool = flag(False, help="Learned positions beside rope; no supported family has them.")
    rotary_base: float = flag(10000.0, help="Rope base (theta).", above=0)
    rotary_percent: float = flag(1.0, help="Share of each head that is rotated.", above=0, most=1)
    use_rope_scaling: bool = flag(False, help="Llama 3 rope scaling.")
    rope_scaling_factor: float = flag(8.0, help="Factor of --use-rope-scaling.", above=0)
    attention_dropout: float = flag(
        0.0, help="Must be 0: log-probs of a policy must be reproducible.", least=0, below=1
    )
    hidden_dropout: float = flag(0.0, help="Must be 0, as --attention-dropout.", least=0, below=1)
    attention_softmax_in_fp32: bool = flag(True, help="Attention softmax in fp32 (our attention always does).")
    attention_backend: str = flag(
        "auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
        help="Transformer-engine attention (flash needs flash-attn); local: torch's own layers even beside it, as auto"
        " where it does not work. On a CPU host torch SDPA is used and this is only noted.",
    )

    rope_fusion: bool = flag(False, help="Fused rope kernel; never used, so that every host computes the same numbers.")
    masked_softmax_fusion: bool = flag(False, help="Fused softmax kernel; never used, as --rope-fusion.")
    rotary_interleaved: bool = flag(False, help="Rotate neighbouring channels instead of halves (GLM-4).")
    rotary_scaling_factor: float = flag(1.0, help="Yarn factor of multi-latent attention.", above=0)
    post_self_attn_layernorm: bool = flag(False, help="Another norm after attention (GLM-4).")
    post_mlp_layernorm: bool = flag(False, help="Another norm after the MLP (GLM-4).")
    multi_latent_attention: bool = flag(False, help="Attention with compressed keys and values (DeepSeek).")
    q_lora_rank: int | None = flag(
        None, help="Width of compressed queries; without it they are not compressed.", least=1
    )
    kv_lora_rank: int = flag(512, help="Width of compressed keys and values.", least=1)
    qk_head_dim: int = flag(128, help="Channels of a query/key head without position.", least=1)
    qk_pos_emb_head_dim: int = flag(64, help="Channels of a query/key head that are rotated.", least=1)
    v_head_dim: int = flag(128, help="Channels of a value head.", least=1)
    mscale: float = flag(1.0, help="Yarn attention scale.", least=0)
    mscale_all_dim: float = flag(0.0, help="Yarn attention scale on all channels.", least=0)
    original_max_position_embeddings: int = flag(
        4096, help="Longest sequence before yarn stretched the positions.", least=1
    )
    beta_fast: float = flag(
        32.0,
        help="Yarn: channels that turn more often than this over the original length are left as they are.",
        above=0,
    )
    beta_slow: float = flag(
        1.0,
        help="Yarn: channels that turn less often than this are stretched by the whole factor.",
        above=0,
    )
    num_experts: int = flag(
        0, help="Experts of each mixture-of-experts layer. 0: the model is dense.", least=0, most=100_000
    )
    moe_layer_freq: str = flag("1", help="Which layers have experts: N (every Nth), or a list such as [0]*3+[1]*75.")
    moe_ffn_hidden_size: int | None = flag(None, help="Width inside one expert. Default: --ffn-hidden-size.", least=1)
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        help="Width of all shared experts together; without it there are none.",
        least=1,
    )
    moe_shared_expert_gate: bool = flag(False, help="Gate on the shared expert's output.")
    moe_router_topk: int = flag(2, help="Experts per token.", least=1)
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid"), help="How router logits become scores."
    )
    moe_router_pre_softmax: bool = flag(False, help="Softmax before the top k instead of after.")
    moe_router_enable_expert_bias: bool = flag(False, help="A bias per expert for choosing, without auxiliary loss.")
    moe_router_bias_update_rate: float = flag(1e-3, help="Step of that bias.", least=0)
    moe_router_load_balancing_type: str = flag(
        "aux_loss", choices=("none", "aux_loss", "seq_aux_loss"), help="Balancing of the experts."
    )
    moe_aux_loss_coeff: float = flag(0.0, help="Weight of the auxiliary loss.", least=0)
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), help="Precision of the router.")
    moe_router_topk_scaling_factor: float | None = flag(None, help="Factor on the chosen scores.", above=0)
    moe_router_num_groups: int | None = flag(None, help="Groups of experts, for group-limited routing.", least=1)
    moe_router_group_topk: int | None = flag(None, help="Groups a token may go to.", least=1)
    moe_token_dispatcher_type: str = flag(
        "alltoall", choices=("allgather", "alltoall", "flex"), help="How tokens reach their experts."
    )
    moe_token_drop_policy: str = flag(
        "probs", choices=("probs", "position"), help="Which tokens a full expert drops; experts have no limit here."
    )
    moe_grouped_gemm: bool = flag(False, help="One kernel for all experts of a GPU.")
    moe_permute_fusion: bool = flag(False, help="Fused token permutation.")
    moe_enable_deepep: bool = flag(False, help="DeepEP communication, with the flex dispatcher.")

    @property
    def is_known(self) -> bool:
        """Whether the architecture is here, from flags or from a checkpoint; else all sizes are 0."""
        return self.num_layers > 0

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts. Raises ValueError if --moe-layer-freq makes no sense."""
        if not self.num_experts:
            return (False,) * self.num_layers
        pattern = parse_layer_pattern(self.moe_layer_freq, self.num_layers)
        return tuple(pattern)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, whether grouped or not."""
        return (
            self.num_query_groups if self.group_query_attention and self.num_query_groups else self.num_attention_heads
        )

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
        problems = []
        for name in ("hidden_size", "num_attention_heads", "vocab_size"):
            if not getattr(self, name):
                problems.append(
                    f"the architecture is incomplete: --{name.replace('_', '-')} is missing. Fix: give it, or leave out"
                    " --num-layers and give --hf-checkpoint."
                )
        if problems:
            return problems
        if self.group_query_attention and not self.num_query_groups:
            problems.append("--group-query-attention needs --num-query-groups.")
        elif self.num_attention_heads % self.num_kv_heads:
            problems.append(
                f"{self.num_attention_heads} heads do not divide into {self.num_kv_heads} groups:"
                " --num-attention-heads, --num-query-groups."
            )
        if not self.kv_channels and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads. Fix: give"
                " --kv-channels."
            )
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name):
                problems.append(
                    f"--{name.replace('_', '-')} {getattr(self, name)} is not supported: a policy's log-probs must be"
                    " reproducible. Fix: 0."
                )
        if not self.swiglu:
            problems.append("only gated SiLU models are supported (Qwen2, Qwen3, Llama). Fix: --swiglu.")
        if self.normalization != "RMSNorm":
            problems.append("only RMSNorm models are supported (Qwen2, Qwen3, Llama). Fix: --normalization RMSNorm.")
        if not self.disable_bias_linear:
            problems.append(
                "only models without linear biases are supported. Fix: --disable-bias-linear (and --add-qkv-bias for"
                " Qwen2)."
            )
        if not self.use_rotary_position_embeddings:
            problems.append("--no-use-rotary-position-embeddings: the supported families all use rope.")
        if not 0 < self.rotary_percent <= 1.0:
            problems.append(f"--rotary-percent {self.rotary_percent}: must be in (0, 1].")
        for name in ("position_embedding", "rope_fusion", "masked_softmax_fusion"):
            if getattr(self, name):
                problems.append(f"--{name.replace('_', '-')} is not supported. Fix: leave it out.")
        if self.multi_latent_attention and self.group_query_attention:
            problems.append("--multi-latent-attention and --group-query-attention exclude each other. Fix: drop one.")
        return problems + self._idle_problems() + (self._expert_problems() if self.num_experts else [])

    def _idle_problems(self) -> list[str]:
        """Flags of a part that this model does not have."""
        experts = tuple(field.name for field in dataclasses.fields(self) if field.name.startswith("moe_"))
        idle = [("--num-experts", name) for name in experts if not self.num_experts]
        idle += [("--multi-latent-attention", name) for name in _LATENT if not self.multi_latent_attention]
        return [
            f"--{name.replace('_', '-')} {getattr(self, name)} does nothing without {needed}. Fix: add it, or drop"
            " this."
            for needed, name in idle
            if getattr(self, name) != getattr(ModelConfig, name)
        ]

    def _expert_problems(self) -> list[str]:
        problems = []
        if (
            self.moe_router_bias_update_rate not in (0, ModelConfig.moe_router_bias_update_rate)
            and not self.moe_router_enable_expert_bias
        ):
            rate = self.moe_router_bias_update_rate
            problems.append(
                f"--moe-router-bias-update-rate {rate} does nothing without --moe-router-enable-expert-bias. Fix: add"
                " it, or drop this."
            )
        if not 0 < self.moe_router_topk <= self.num_experts:
            problems.append(
                f"--moe-router-topk {self.moe_router_topk}: must be from 1 to --num-experts {self.num_experts}."
            )
        if (
            self.moe_router_topk == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
        ):
            problems.append(
                "--moe-router-topk 1: a softmax over one chosen expert is always 1, so the router would not learn. Fix:"
                " --moe-router-pre-softmax."
            )
        try:
            self.expert_layers  # noqa: B018  (raises)
        except ValueError as error:
            problems.append(f"--moe-layer-freq {error}.")
        if self.moe_enable_deepep and self.moe_token_dispatcher_type != "flex":
            problems.append(
                f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, not {self.moe_token_dispatcher_type}."
            )
        if self.moe_router_num_groups and (
            self.num_experts % self.moe_router_num_groups or not self.moe_router_group_topk
        ):
            problems.append(
                f"--moe-router-num-groups {self.moe_router_num_groups}: must divide --num-experts {self.num_experts}"
                " and needs --moe-router-group-topk."
            )
        return problems
