"""Flags -> this rank's part of a GPT model, wrapped for data parallelism: one chunk of layers, or several with an
interleaved pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.megatron_backend.compat.transformer_engine import uses_transformer_engine
from slime_like.megatron_backend.hf.names_and_shards import mark_duplicated
from slime_like.megatron_backend.lora.adapter import AdapterSwitch
from slime_like.megatron_backend.lora.build import put_adapters
from slime_like.megatron_backend.model.attention import CausalAttention
from slime_like.megatron_backend.model.fake_quantised import compute_in_int4
from slime_like.megatron_backend.model.layer_spec import block_spec
from slime_like.megatron_backend.model.packed import take_packs_as_rows
from slime_like.megatron_backend.model.value_head import put_value_head


def trains_in_bf16(optimizer: OptimizerConfig) -> bool:
    """--bf16, or by default whether there is CUDA."""
    return torch.cuda.is_available() if optimizer.bf16 is None else optimizer.bf16


def transformer_config(model: ModelConfig, parallel: ParallelConfig, *, bf16: bool) -> TransformerConfig:
    """Megatron's description of the layers. Needs the process groups' sizes only through `parallel`."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return (MLATransformerConfig if model.multi_latent_attention else TransformerConfig)(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.mlp_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_size,
        gated_linear_unit=model.swiglu,
        activation_func=functional.silu,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        rotary_interleaved=model.rotary_interleaved,
        **_latent(model),
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        attention_softmax_in_fp32=model.attention_softmax_in_fp32,
        attention_backend=AttnBackend[model.attention_backend],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **_pipeline(model, parallel),
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        # The only dispatcher for variable lengths; 0.16.1 refuses its default even for models without experts.
        moe_token_dispatcher_type="alltoall",
        **_experts(model, parallel),
        # Every rank draws the whole weight and keeps its part, so an unloaded tensor would not depend on the layout.
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),  # --deterministic
        use_cpu_initialization=not torch.cuda.is_available(),
        # These kernels need apex or a compiler; without them the same numbers come out on every host.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def _latent(model: ModelConfig) -> dict:
    """What MLATransformerConfig needs beside: sizes, and rope, which its attention makes itself."""
    if not model.multi_latent_attention:
        return {}
    same = (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *(
            "rotary_base",
            "rotary_scaling_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ),
    )
    return {name: getattr(model, name) for name in same} | {
        "rope_type": "rope" if model.rotary_scaling_factor == 1.0 else "yarn"
    }


def _pipeline(model: ModelConfig, parallel: ParallelConfig) -> dict:
    """Which layers a pipeline stage has, and how stages exchange what they send."""
    num_chunks = parallel.virtual_pipeline_size(model.num_layers)
    interleaved = num_chunks is not None
    # With one stage the flags can only say what is so anyway.
    uneven = parallel.pipeline_model_parallel_size > 1
    return {
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": num_chunks,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers if uneven else None,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers if uneven else None,
        # Packs differ in length, so the stages tell each other the shape of what they send. Interleaved, two stages
        # would exchange the shapes of both directions in one batch and take one for the other (0.16.1), so there packs
        # have one length (packing.PackLayout.holding).
        "variable_seq_lengths": not interleaved,
        # Megatron's rule: two stages must not exchange both directions in one batch either.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": torch.cuda.is_available() and not interleaved,
    }


def _experts(model: ModelConfig, parallel: ParallelConfig) -> dict:
    """What TransformerConfig needs to know of the experts; nothing for a dense model.

    Qwen3-MoE's norm_topk_prob is a softmax over the chosen logits: the same as softmax over all, chosen, then divided
    by their sum. Without it the softmax comes first (moe_router_pre_softmax). One kernel for all experts, and fused
    permutation, exist in transformer-engine only; without it the experts run one after the other.
    """
    if not model.num_experts:
        return {}
    fast = uses_transformer_engine(model.attention_backend)
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.mlp_size,
        "moe_layer_freq": [int(has_experts) for has_experts in model.expert_layers],
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_dtype": model.moe_router_dtype,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_grouped_gemm": model.moe_grouped_gemm and fast,
        "moe_permute_fusion": model.moe_permute_fusion and fast,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tp_size,
    }


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    *,
    value_head: bool = False,
    adapters: AdapterSwitch | None = None,
    own_attention: bool = False,
) -> list[DistributedDataParallel]:
    """This rank's model chunks with gradient buffers, first layers first; weights are random until loaded.

    value_head: a critic. adapters: of a policy that trains nothing else; they are zeros until filled. own_attention:
    also where transformer-engine has one, which takes no samples that share their prompts.
    """
    chunks = build_frozen(
        model, parallel, optimizer, value_head=value_head, adapters=adapters, own_attention=own_attention
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optimizer.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        align_param_gather=parallel.overlap_param_gather and len(chunks) > 1,
    )
    # Of several chunks only the first is cut into buckets: the others' collectives have the first one's passes to hide
    # behind.
    return [
        DistributedDataParallel(get_model_config(chunk), ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build_frozen(
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    *,
    value_head: bool = False,
    adapters: AdapterSwitch | None = None,
    own_attention: bool = False,
) -> list[torch.nn.Module]:
    """This rank's model chunks without gradient buffers, for a role that only scores.

    Weights are random until loaded.
    """
    if adapters is not None:  # routers learn their bias without gradients, and the base is to stay as it is
        model = dataclasses.replace(model, moe_router_bias_update_rate=0.0)
    config = transformer_config(model, parallel, bf16=trains_in_bf16(optimizer))
    chunks = [
        _build_chunk(
            model, parallel, config, number, value_head=value_head, adapters=adapters, own_attention=own_attention
        )
        for number in range(parallel.virtual_pipeline_size(model.num_layers) or 1)
    ]
    if optimizer.int4_group_size is not None and not value_head:
        for chunk in unwrap(chunks):
            compute_in_int4(chunk, optimizer.int4_group_size)
    return chunks


def _build_chunk(
    model: ModelConfig,
    parallel: ParallelConfig,
    config: TransformerConfig,
    number: int,
    *,
    value_head: bool,
    adapters: AdapterSwitch | None,
    own_attention: bool,
) -> torch.nn.Module:
    """Chunk `number` of this rank, in bf16 inside its wrapper."""
    place = {"ignore_virtual": False, "vp_stage": number}
    post_norms = model.post_self_attn_layernorm and model.post_mlp_layernorm
    stage = GPTModel(
        config,
        block_spec(config, number, post_norms=post_norms, own_attention=own_attention),
        vocab_size=model.padded_vocab_size(parallel.tensor_model_parallel_size),
        max_sequence_length=model.context_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights and not value_head,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        vp_stage=number,
    )
    if value_head:
        put_value_head(stage)
    mark_duplicated(stage, model)
    if adapters is not None:
        put_adapters(stage, model, adapters)
    if any(isinstance(module, CausalAttention) for module in stage.modules()):
        take_packs_as_rows(stage)
    if torch.cuda.is_available():
        stage = stage.cuda()
    if config.bf16:
        stage = Float16Module(config, stage)
    return stage


def unwrap(model: Sequence[torch.nn.Module]) -> torch.nn.ModuleList:
    """The GPTModels inside the data parallel and bf16 wrappers, in the order of `model`."""
    chunks = torch.nn.ModuleList()
    for chunk in model:
        while not isinstance(chunk, GPTModel):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


def release_hooks(model: Iterable[torch.nn.Module]) -> None:
    """Let go of what keeps closed chunks alive: megatron's data parallel wrapper (0.16.1) and its hooks on gradient
    accumulators hold each other where Python's collector does not see it, and with them the process groups, each of
    which has threads that go on polling.
    """
    for chunk in model:
        accumulators = getattr(chunk, "grad_accs", [])
        for accumulator in accumulators:
            # torch has no way to ask for a node's hooks; a handle of one more leads to all of them.
            hooks = accumulator.register_hook(_no_hook).hooks_dict_ref()
            if hooks is not None:
                hooks.clear()
        accumulators.clear()


def _no_hook(*_) -> None:
    """Does nothing."""
