"""The plan's bytes are those of real megatron-core models: names, shapes, buffers with their padding, optimizer state
after a step.
"""

# Covers slime_like.megatron_backend.model.provider too, which it does not import itself.

import pytest

from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.activations import ActivationSizes
from slime_like.planning.memory.parameters import stage_buffer_bytes, stage_chunks
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes
from tests.helpers.mcore_world import Layout, measure
from tests.helpers.train_world import free_ports, run_ranks

pytestmark = pytest.mark.multiprocess

FP32 = OptimizerConfig(bf16=False)


def dense(**changes) -> ModelConfig:
    """A Llama-like model with sizes that make every padding show (no multiples of 64)."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 24,
        "ffn_hidden_size": 52,
        "num_attention_heads": 4,
        "kv_channels": 10,
        "vocab_size": 101,
    }
    common = {
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    }
    return ModelConfig(**(sizes | common | {"group_query_attention": True, "num_query_groups": 2} | changes))


def split(tp=1, pp=1, **more) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **more)


QWEN2 = dense(add_qkv_bias=True, untie_embeddings_and_output_weights=False)
PADDED = dense(add_qkv_bias=True, untie_embeddings_and_output_weights=False, make_vocab_size_divisible_by=64)
QWEN3 = dense(qk_layernorm=True)
EXPERTS = dense(
    qk_layernorm=True, num_experts=4, moe_ffn_hidden_size=20, moe_layer_freq="[0]*1+[1]*3",
    moe_shared_expert_intermediate_size=28,
    moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
)  # fmt: skip
GATED = dense(
    num_experts=4, moe_ffn_hidden_size=20, moe_shared_expert_intermediate_size=28, moe_shared_expert_gate=True
)
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 20,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
}
MLA, MLA_Q = dense(**LATENT), dense(**LATENT, q_lora_rank=14)
DEEPSEEK = dense(
    **LATENT,
    q_lora_rank=14,
    num_experts=4,
    moe_ffn_hidden_size=20,
    moe_layer_freq="[0]*1+[1]*3",
    moe_shared_expert_intermediate_size=28,
)
CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}
REPLICATED = {"use_distributed_optimizer": False}

LAYOUTS = [
    Layout("llama, one rank", dense()),
    Layout("llama, one rank, fp32", dense(), optimizer=FP32),
    Layout("qwen2 tied, one rank", QWEN2),
    Layout("qwen3, tp2", QWEN3, 2, split(2)),
    Layout("qwen2 tied, padded vocabulary, tp2", PADDED, 2, split(2)),
    Layout("qwen3, pp2 uneven", QWEN3, 2, split(1, 2, decoder_last_pipeline_num_layers=1)),
    Layout("qwen3, pp2 uneven first", QWEN3, 2, split(1, 2, decoder_first_pipeline_num_layers=1)),
    Layout("qwen2 tied, pp2", QWEN2, 2, split(1, 2)),
    Layout("qwen2 tied, tp2 pp2", QWEN2, 4, split(2, 2)),
    Layout("qwen3, dp2", QWEN3, 2),
    Layout("qwen3, dp4", QWEN3, 4),
    Layout("qwen3, dp4, fp32", QWEN3, 4, optimizer=FP32),
    Layout("qwen3, dp3", QWEN3, 3),
    Layout("qwen2 tied, pp2 dp2", QWEN2, 4, split(1, 2)),
    Layout("qwen3, dp2, replicated optimizer", QWEN3, 2, split(**REPLICATED)),
    Layout("qwen3, dp2, replicated optimizer, fp32", QWEN3, 2, split(**REPLICATED), FP32),
    Layout("qwen2 tied, interleaved pp2", QWEN2, 2, split(1, 2, **CHUNKS)),
    Layout("experts, interleaved pp2 dp2", EXPERTS, 4, split(1, 2, **CHUNKS)),
    Layout("qwen3, dp2, overlapping", QWEN3, 2, split(overlap_grad_reduce=True), bucket_elements=9000),
    Layout("qwen2 tied, interleaved pp2 dp2, overlapping", QWEN2, 4, split(1, 2, **CHUNKS, overlap_grad_reduce=True),
        bucket_elements=3000),
    Layout("qwen3, dp2, bf16 gradients", QWEN3, 2,
        optimizer=OptimizerConfig(bf16=True, accumulate_allreduce_grads_in_fp32=False)),
    Layout("experts, one rank", EXPERTS),
    Layout("experts, ep2", EXPERTS, 2, split(expert_model_parallel_size=2)),
    Layout("experts, ep2 dp4", EXPERTS, 4, split(expert_model_parallel_size=2)),
    Layout("experts, tp2 etp1 ep2", EXPERTS, 2,
        split(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, sequence_parallel=True)),
    Layout("experts, tp2 etp2 ep2", EXPERTS, 4, split(2, expert_model_parallel_size=2, sequence_parallel=True)),
    Layout("gated shared experts, pp2 ep2", GATED, 4, split(1, 2, expert_model_parallel_size=2)),
    Layout("glm4, tp2", dense(add_qkv_bias=True, post_self_attn_layernorm=True, post_mlp_layernorm=True), 2, split(2)),
    Layout("mla, one rank", MLA),
    Layout("mla with compressed queries, tp2", MLA_Q, 2, split(2)),
    Layout("deepseek, pp2 ep2", DEEPSEEK, 4, split(1, 2, expert_model_parallel_size=2)),
]  # fmt: skip

# Wider models for activations: at a few channels, row statistics and rope tables would outweigh the layers.
WIDE = {"hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 8, "kv_channels": 24, "num_layers": 2}
WIDE_LATENT = LATENT | {
    "kv_lora_rank": 40,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "q_lora_rank": 48,
}
WIDE_EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "moe_layer_freq": "[0]*1+[1]*1",
}
MEASURED = [
    Layout("llama", dense(**WIDE), tokens=256),
    Layout("llama fp32", dense(**WIDE), optimizer=FP32, tokens=256),
    Layout("qwen3", dense(**WIDE, qk_layernorm=True), tokens=256),
    Layout("qwen3 fp32", dense(**WIDE, qk_layernorm=True), optimizer=FP32, tokens=256),
    Layout("qwen3, tp2", dense(**WIDE, qk_layernorm=True), 2, split(2), tokens=256),
    Layout(
        "qwen3, tp2 with sequence parallel",
        dense(**WIDE, qk_layernorm=True),
        2,
        split(2, sequence_parallel=True),
        tokens=256,
    ),
    Layout("llama, pp2", dense(**WIDE), 2, split(1, 2), tokens=256),
    Layout(
        "all layers recomputed",
        dense(**WIDE),
        parallel=split(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        tokens=256,
    ),
    Layout(
        "pairs of layers recomputed",
        dense(**WIDE),
        parallel=split(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
        tokens=256,
    ),
    Layout(
        "one layer recomputed",
        dense(**WIDE),
        parallel=split(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
        tokens=256,
    ),
    Layout("experts", dense(**WIDE, **WIDE_EXPERTS), tokens=256),
    Layout("mla", dense(**(WIDE | WIDE_LATENT)), tokens=256),
]
#: Largest error of the activation estimate on these layouts; docs/planning.md gives it to users.
ACTIVATION_ERROR = 0.06


@pytest.fixture(scope="module")
def truths():
    """layout -> what each of its ranks holds, all from one world of four processes."""
    every = LAYOUTS + MEASURED
    by_rank = run_ranks(measure, 4, every, free_ports(len(every)), timeout_s=250)
    return [[by_rank[rank][number] for rank in range(layout.ranks)] for number, layout in enumerate(every)]


def planned(layout: Layout, rank: int) -> dict:
    """What the plan says of this rank, under the names of `held_bytes`."""
    parallel = layout.parallel
    per_stage = layout.ranks // parallel.pipeline_model_parallel_size
    stage, within = divmod(rank, per_stage)
    experts = parallel.expert_tp_size * parallel.expert_model_parallel_size
    chunks = stage_chunks(layout.model, parallel, stage)
    precision = Precision.of(layout.optimizer)
    sizes = {
        "dp_size": per_stage // parallel.tensor_model_parallel_size,
        "expert_dp_size": max(1, per_stage // experts),
    }
    bytes_ = StageBytes(
        chunks, parallel, precision, **sizes, bucket_elements=layout.bucket_elements if stage == 0 else None
    )
    mine = bytes_.of(within // parallel.tensor_model_parallel_size, within // experts)
    return {
        "parameters": [(p.name, p.shape) for chunk in chunks for p in chunk],
        "weights": mine.weights,
        "gradients": mine.gradients,
        "buckets": bytes_.num_buckets,
        "optimizer": mine.optimizer,
        "beside": stage_buffer_bytes(layout.model, parallel, stage, weight_bytes=precision.weight),
    }


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[layout.name for layout in LAYOUTS])
def test_every_rank_holds_what_the_plan_says(truths, number):
    for rank, truth in enumerate(truths[number]):
        assert planned(LAYOUTS[number], rank) == truth, f"rank {rank}"


@pytest.mark.parametrize("number", range(len(MEASURED)), ids=[layout.name for layout in MEASURED])
def test_activations_are_estimated_within_the_stated_error(truths, number):
    layout = MEASURED[number]
    width = Precision.of(layout.optimizer).weight
    sizes = ActivationSizes(model=layout.model, parallel=layout.parallel, width=width, transformer_engine=False)
    for rank, truth in enumerate(truths[len(LAYOUTS) + number]):
        stage = rank * layout.parallel.pipeline_model_parallel_size // layout.ranks
        estimate = sizes.kept_bytes(stage)[0] * layout.tokens
        error = estimate / truth["saved"] - 1
        print(f"{layout.name}, rank {rank}: {estimate:.0f} of {truth['saved']} bytes, {error:+.1%}")
        assert abs(error) <= ACTIVATION_ERROR
