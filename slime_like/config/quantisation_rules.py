"""What --rollout-quantization needs of other flags, and of the model's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from slime_like.config.model import ModelConfig
from slime_like.config.quantisation import BLOCK, QuantScheme, given_problems, scheme_of
from slime_like.config.tree import ConfigTree


def quantisation_problems(config: ConfigTree) -> list[str]:
    """Combinations of --rollout-quantization with others that are impossible; nothing as long as sizes of engines or
    model are.
    """
    scheme = scheme_of(config.sync.rollout_quantization)
    if scheme is None or config.engine.problems() or (config.model.is_known and config.model.problems()):
        return []
    flag_name = f"--rollout-quantization {scheme.name}"
    unproven = (
        "where these engines keep their scales is not known here, and what is not proven is not served. Fix: drop it"
    )
    wrong = {
        "this run sends no weights. Fix: leave it out": not config.uses_engines or config.placement.debug_rollout_only,
        "--update-weight-mode adapter sends no base, and engines start without one. Fix: --update-weight-mode full,"
        " which sends adapters merged": config.sync.sends_adapters,
        "engines start with made-up weights, and only digests show that all were replaced. Fix: --verify-weight-sync"
        " digest or full": not config.sync.compares_digests,
        f"--sglang-pp-size above 1: {unproven}": config.engine_pp_size > 1,
        f"--sglang-ep-size above 1: {unproven}": config.engine_ep_size > 1,
        f"--sglang-enable-dp-attention: {unproven}": config.engine.dp_attention,
    }
    problems = [f"{flag_name}: {why}." for why, applies in wrong.items() if applies]
    problems += given_problems(config.engine.sglang)
    return problems + (_model_problems(config, scheme, flag_name) if config.model.is_known else [])


def _model_problems(config: ConfigTree, scheme: QuantScheme, flag_name: str) -> list[str]:
    model, gpus = config.model, config.engine_tp_size
    if model.multi_latent_attention and scheme.rows == 1:
        # Engines on a CPU host do not compute it at all, and those on CUDA take no second update of int8 (0.5.23).
        return [f"{flag_name}: engines with multi-head latent attention take no int8. Fix: fp8, on a GPU host."]
    if scheme.rows != BLOCK:
        return []
    uneven = [
        f"{what} is {size}" + (f" on {parts} GPUs" if parts > 1 else "")
        for what, size, parts in _sizes(model, gpus)
        if size % (BLOCK * parts)
    ]
    if not uneven:
        return []
    fewer = "a smaller --rollout-num-gpus-per-engine, or " if gpus > 1 else ""
    return [
        (
            f"{flag_name} cuts matrices into blocks of {BLOCK} x {BLOCK}, of which each of an engine's GPUs must have"
            f" whole ones: {'; '.join(uneven)}. Fix: {fewer}--rollout-quantization int8, which has no blocks."
        )
    ]


def _sizes(model: ModelConfig, gpus: int) -> Iterator[tuple[str, int, int]]:
    """What SGLang wants to divide into blocks (0.5.23, quantization/fp8.py, validate_block_quant_shapes, and
    per_token_group_quant_fp8 of the activations): (name, size, GPUs that share it).
    """
    yield "the hidden size", model.hidden_size, 1
    yield from (_latent_sizes if model.multi_latent_attention else _head_sizes)(model, gpus)
    experts = model.expert_layers
    if not all(experts):
        yield "--ffn-hidden-size", model.mlp_size, gpus
    if any(experts):
        yield "--moe-ffn-hidden-size", model.moe_ffn_hidden_size or model.mlp_size, gpus
        if shared := model.moe_shared_expert_intermediate_size:
            yield "--moe-shared-expert-intermediate-size", shared, gpus


def _head_sizes(model: ModelConfig, gpus: int) -> Iterator[tuple[str, int, int]]:
    size, heads, kv_heads = model.head_size, model.num_attention_heads, model.num_kv_heads
    yield f"{heads} query heads x {size}", heads * size, gpus
    # With more GPUs than heads, several have the same one.
    yield f"{kv_heads} key heads x {size}", max(kv_heads, gpus) * size, gpus


def _latent_sizes(model: ModelConfig, gpus: int) -> Iterator[tuple[str, int, int]]:
    heads, plain, value = model.num_attention_heads, model.qk_head_dim, model.v_head_dim
    if model.q_lora_rank is not None:
        yield "--q-lora-rank", model.q_lora_rank, 1
    yield "--kv-lora-rank", model.kv_lora_rank, 1
    yield f"{heads} value heads x {value}", heads * value, gpus
    if gpus > 1:
        rotated = model.qk_pos_emb_head_dim
        yield f"{heads} query heads x ({plain} + {rotated})", heads * (plain + rotated), gpus
        yield f"{heads} heads x ({plain} + {value}) of --kv-lora-rank's expansion", heads * (plain + value), gpus
