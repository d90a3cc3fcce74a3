"""Layer parts: transformer-engine's where it is usable and --attention-backend is not local, otherwise ours on plain
torch, with the same parameter names in checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from slime_like.megatron_backend.compat.transformer_engine import uses_transformer_engine
from slime_like.megatron_backend.model.attention import CausalAttention


def block_spec(
    config: TransformerConfig, chunk: int = 0, *, post_norms: bool = False, own_attention: bool = False
) -> TransformerBlockSubmodules:
    """The decoder layers of one chunk of this pipeline stage; not interleaved, a stage has one chunk.

    post_norms: see PostNormLayer. own_attention: CausalAttention between transformer-engine's other parts, too.
    """
    options = {"normalization": config.normalization, "vp_stage": chunk}
    if uses_transformer_engine(config.attention_backend.name):
        block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, **options)
        norm = gpt_layer_specs.TENorm
        for spec in _distinct(block.layer_specs) if own_attention else ():
            spec.submodules.self_attention.submodules.core_attention = CausalAttention
    else:
        # multi_latent_attention.py:58 (0.16.1) takes its own stand-in for transformer-engine as the real one, and then
        # asks isinstance(…, a mock); and MLASelfAttention passes a matrix as whole only to TELinear. A process makes
        # models of one kind of layers. Goes when it asks the spec.
        multi_latent_attention.HAVE_TE, multi_latent_attention.TELinear = False, ReplicatedLinear
        # get_gpt_decoder_block_spec (0.16.1) takes no provider, so ours stands in while it runs. Goes when it takes
        # one.
        stock = gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl
        gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl = TorchSpecProvider, Norm
        try:
            block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options)
        finally:
            gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl = stock
        norm = Norm
        for spec in _distinct(block.layer_specs):
            _fit_torch_layer(spec.submodules)
    if post_norms:
        for spec in _distinct(block.layer_specs):
            spec.module = PostNormLayer
            spec.submodules = PostNormSubmodules(**vars(spec.submodules), post_norm=norm)
    return block


def _distinct(specs: list[ModuleSpec]) -> list[ModuleSpec]:
    """Layers of one kind share their spec."""
    return list({id(spec): spec for spec in specs}.values())


def _fit_torch_layer(parts: TransformerLayerSubmodules) -> None:
    """Whole down projections as transformer-engine's layers have them, and in checkpoints the names that norms have
    where it fuses them.
    """
    attention = parts.self_attention
    names: dict[str, str] = {}
    if attention.module is MLASelfAttention:
        attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = ReplicatedLinear
        names |= {
            f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")
        }
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if parts.mlp.module is not MoELayer:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts.sharded_state_dict_keys_map = names


@dataclasses.dataclass
class PostNormSubmodules(TransformerLayerSubmodules):
    """Parts of a PostNormLayer."""

    post_norm: type = IdentityOp


class PostNormLayer(TransformerLayer):
    """A layer that norms what attention and MLP give before it is added to the residual stream (GLM-4)."""

    def __init__(self, config: TransformerConfig, submodules: PostNormSubmodules, *args, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(submodules.post_norm, **sizes)
        self.post_mlp_layernorm = build_module(submodules.post_norm, **sizes)
        # Megatron (0.16.1) has no place for such norms; adding to the residual stream is the step right behind.
        self.self_attn_bda = _normed(self.post_self_attn_layernorm, build_module(submodules.self_attn_bda))
        self.mlp_bda = _normed(self.post_mlp_layernorm, build_module(submodules.mlp_bda))


def _normed(norm: torch.nn.Module, get_add: Callable) -> Callable:
    """Megatron's get_bias_dropout_add whose function norms the output first; there is no bias."""

    def get(training: bool, fused: bool) -> Callable:
        add = get_add(training, fused)
        return lambda output_with_bias, residual, probability: add(
            (norm(output_with_bias[0]), None), residual, probability
        )

    return get


class ReplicatedLinear(torch.nn.Module):
    """A whole matrix on every tensor parallel rank, applied to the rank's own part of the sequence:
    transformer-engine's "duplicated" mode.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Callable, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        # Megatron adds such gradients up over the tensor parallel group: each rank saw only its part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[…, input] -> ([…, output], no bias)."""
        return functional.linear(hidden, self.weight), None


class Norm:
    """torch.nn.RMSNorm that tells megatron to sum its gradients over sequence parallel ranks (megatron's own refuses
    them).
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        if torch.cuda.is_available():
            norm = norm.cuda()
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class TorchSpecProvider(LocalSpecProvider):
    """Megatron's local parts with our norm and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False):
        return Norm

    def core_attention(self):
        return CausalAttention
