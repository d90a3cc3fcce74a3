"""Builds real megatron-core models of every family and reports what they hold: the truth for planning/."""

from __future__ import annotations

import dataclasses

from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """One model in one split. activations: also run a forward pass and count what it saves."""

    name: str
    model: ModelConfig
    ranks: int = 1
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig(bf16=True)
    bucket_elements: int | None = None  # where overlapping reductions cut the first stage's buffer
    tokens: int = 0  # of a forward pass whose saved tensors are counted; 0: none


def build(layout: Layout):
    """This rank's chunks of layers (one, unless interleaved), wrapped for data parallelism.

    The groups must be there.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from slime_like.megatron_backend.model.layer_spec import block_spec
    from slime_like.megatron_backend.model.packed import take_packs_as_rows

    model, parallel, optimizer = layout.model, layout.parallel, layout.optimizer
    config = transformer_config(model, parallel, bf16=bool(optimizer.bf16))
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            block_spec(config, number, post_norms=model.post_mlp_layernorm),
            vocab_size=model.padded_vocab_size(parallel.tensor_model_parallel_size),
            max_sequence_length=512,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            vp_stage=number,
        )
        take_packs_as_rows(chunk)
        chunks.append(Float16Module(config, chunk) if optimizer.bf16 else chunk)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optimizer.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        bucket_size=layout.bucket_elements,
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]


def transformer_config(model: ModelConfig, parallel: ParallelConfig, *, bf16: bool):
    """Megatron's description of any family: dense, experts, multi-latent attention."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    more: dict = {}
    if model.num_experts:
        more |= {
            "num_moe_experts": model.num_experts,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
            "moe_shared_expert_gate": model.moe_shared_expert_gate,
            "moe_layer_freq": [int(expert) for expert in model.expert_layers],
            "moe_router_topk": model.moe_router_topk,
            "moe_router_score_function": model.moe_router_score_function,
            "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
            "moe_router_load_balancing_type": "none",
        }
    if model.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        more |= {"multi_latent_attention": True, "rope_type": "rope"} | {name: getattr(model, name) for name in names}
    else:
        more |= {"num_query_groups": model.num_kv_heads, "kv_channels": model.head_size}
    dtype = torch.bfloat16 if bf16 else torch.float32
    return (MLATransformerConfig if model.multi_latent_attention else TransformerConfig)(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.mlp_size,
        num_attention_heads=model.num_attention_heads,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_size(model.num_layers),
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tp_size,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        **more,
    )


def start(layout: Layout, place: dict, port: int) -> None:
    """Join the world of this layout, with expert groups (initialize.py makes none yet)."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel = layout.parallel
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=place["rank"], world_size=layout.ranks
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_size(layout.model.num_layers),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tp_size,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def held_bytes(layout: Layout, chunks: list) -> dict:
    """What this rank holds: [(name, shape)], bytes of weights and gradients, bytes of optimizer
    state after one step.
    """
    import torch
    from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

    flags = layout.optimizer
    buffers = [buffer for stage in chunks for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for stage in chunks for p in stage.parameters()
    }
    inner = [stage.module.module if flags.bf16 else stage.module for stage in chunks]
    for module in (module for stage in inner for module in stage.modules()):
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # as the first forward pass does
    beside = [
        b
        for stage in inner
        for name, b in stage.named_buffers()
        if name.split(".")[-1] in ("expert_bias", "local_tokens_per_expert")
    ]
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=bool(flags.bf16),
            params_dtype=torch.bfloat16 if flags.bf16 else torch.float32,
            use_distributed_optimizer=layout.parallel.use_distributed_optimizer,
        ),
        chunks,
    )
    for buffer in buffers:
        buffer.grad_data.fill_(1e-3)
    optimizer.step()
    state = 0
    known = set(weights)
    for one in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                # a main weight; in fp32 it is a view of the weight itself
                if parameter.untyped_storage().data_ptr() not in known:
                    state += parameter.numel() * parameter.element_size()
                moments = one.optimizer.state[parameter]
                state += sum(moments[name].numel() * moments[name].element_size() for name in ("exp_avg", "exp_avg_sq"))
    return {
        "parameters": [(name, tuple(p.shape)) for stage in inner for name, p in stage.named_parameters()],
        "weights": sum(weights.values()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "buckets": sum(len(b.buckets) for b in buffers),
        "optimizer": state,
        "beside": sum(b.numel() * b.element_size() for b in beside),
    }


def saved_bytes(layout: Layout, stage) -> int:
    """Bytes that one forward pass of `layout.tokens` tokens keeps for the backward pass, parameters not counted."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 forgets it without transformer-engine
    tokens, parallel = layout.tokens, layout.parallel
    boundaries = torch.tensor([0, tokens // 4, tokens], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=tokens, max_seqlen_kv=tokens,
    )  # fmt: skip
    owned = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in owned:
            # kept alive, so that an address is never used twice
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    if not parallel_state.is_pipeline_first_stage():
        inner = stage.module.module if layout.optimizer.bf16 else stage.module
        width = tokens // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
        dtype = torch.bfloat16 if layout.optimizer.bf16 else torch.float32
        inner.set_input_tensor(torch.zeros(width, 1, layout.model.hidden_size, dtype=dtype, requires_grad=True))
    ids = torch.arange(tokens).remainder(layout.model.vocab_size)[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(ids, torch.arange(tokens)[None], None, packed_seq_params=packed)
    assert output.requires_grad
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def measure(place: dict, layouts: list[Layout], ports: list[int]) -> list[dict | None]:
    """For each layout what this rank holds; None where it has no part."""
    from slime_like.megatron_backend.initialize import shut_down

    measured: list[dict | None] = []
    for layout, port in zip(layouts, ports, strict=True):
        if place["rank"] >= layout.ranks:
            measured.append(None)
            continue
        start(layout, place, port)
        chunks = build(layout)
        result = {"saved": saved_bytes(layout, chunks[0])} if layout.tokens else {}
        measured.append(result | held_bytes(layout, chunks))
        shut_down()
    return measured
