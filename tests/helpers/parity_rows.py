"""Which rows the parity table has: every family under 16 or more layouts, packed and padded, and variants of single
flags.
"""

from __future__ import annotations

import dataclasses

from tests.helpers.parity import DYNAMIC, Row
from tests.helpers.tiny_models import CONFIGS

TP, PP, EP = ({name + "_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
CP = {"context_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
ONE_EXPERT_TP = {"expert_tensor_parallel_size": 1}
REPLICATED = {"use_distributed_optimizer": False}
PADDED = {"qkv_format": "bshd", "micro_batch_size": 3}
FORMATS = {"packed": DYNAMIC, "padded": PADDED}

#: name -> (ranks, flags)
DENSE_LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, TP),
    "tp2 sp": (2, SP),
    "pp2": (2, PP),
    "cp2": (2, CP),
    "dp2": (2, {}),
    "dp2, replicated optimizer": (2, REPLICATED),
    "tp2 sp pp2": (4, SP | PP),
    "tp2 dp2": (4, TP),
    "tp2 cp2": (4, TP | CP),
    "tp2 sp cp2": (4, SP | CP),
    "pp2 dp2": (4, PP),
    "pp2 cp2": (4, PP | CP),
    "cp2 dp2": (4, CP),
    "cp4": (4, {"context_parallel_size": 4}),
    "dp4": (4, {}),
}
#: Megatron wants sequence parallelism wherever experts meet tensor parallelism.
EXPERT_LAYOUTS = {
    "one rank": (1, {}),
    "tp2 sp etp2": (2, SP),
    "tp2 sp ep2 etp1": (2, SP | EP | ONE_EXPERT_TP),
    "pp2": (2, PP),
    "cp2": (2, CP),
    "dp2": (2, {}),
    "ep2": (2, EP),
    "ep2, replicated optimizer": (2, EP | REPLICATED),
    "cp2 ep2": (2, CP | EP),
    "tp2 sp ep2 etp2": (4, SP | EP),
    "tp2 sp pp2": (4, SP | PP),
    "tp2 sp cp2": (4, SP | CP),
    "ep2 edp2": (4, EP),
    "ep4": (4, {"expert_model_parallel_size": 4}),
    "ep2 pp2": (4, EP | PP),
    "cp2 dp2": (4, CP),
}
#: Model of a row -> how it is made: the family and what differs from its tiny model.
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# With this base the slowest frequencies have wavelengths beyond 8192 positions, which is what llama3 scaling changes.
LLAMA_ROPE["original_max_position_embeddings"] = 8192
MODELS: dict[str, dict] = {family: {"family": family} for family in CONFIGS}
MODELS["llama"] = {"family": "llama", "rope_parameters": LLAMA_ROPE}
MODELS["qwen2"] = {"family": "qwen2", "tied": True}
MODELS["qwen3 of 4 layers"] = {"family": "qwen3", "num_layers": 4}
MODELS["qwen2 of 4 layers"] = {"family": "qwen2", "tied": True, "num_layers": 4}
MODELS["qwen3_moe of 4 layers"] = {"family": "qwen3_moe", "num_layers": 4}
MODELS["qwen3_moe, weights not divided"] = {"family": "qwen3_moe", "norm_topk_prob": False}

FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
DEEP = "qwen3 of 4 layers"
INTERLEAVED = PP | {"num_virtual_stages_per_pipeline_rank": 2}
BY_FLOPS = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_by_flops": True}
WIDE_SCORES = DYNAMIC | {"log_probs_max_tokens_per_gpu": 90}
#: Less than the tokens of one prompt's samples, so that they are split; more than the longest sample.
SHARED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 28, "share_prompt": "on"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
#: One flag each, on one or two layouts: what the grid above does not vary.
VARIANTS = [
    Row("qwen3", "one rank, samples one by one", 1, {}, batch={}),
    Row("qwen3", "one rank, per token", 1, {}, batch={"micro_batch_size": 4}, loss=PER_TOKEN),
    Row("qwen3", "dp2, per token", 2, REPLICATED, batch={"micro_batch_size": 2}, loss=PER_TOKEN),
    Row("qwen3", "one rank, scores 7 tokens at a time", 1, {}, batch=DYNAMIC | {"log_probs_chunk_size": 7}),
    Row("qwen3", "tp2, packs padded to 32", 2, TP, batch=DYNAMIC | {"data_pad_size_multiplier": 16}),
    Row("qwen3", "tp2 cp2, packs padded to 16", 4, TP | CP, batch=DYNAMIC | {"data_pad_size_multiplier": 8}),
    Row("qwen3", "cp2, samples one by one", 2, CP, batch={}),
    Row("qwen3", "cp2, small packs", 2, CP, batch=DYNAMIC | {"max_tokens_per_gpu": 12}),
    Row("qwen3", "cp2, one pack", 2, CP, batch=DYNAMIC | {"max_tokens_per_gpu": 4000}),
    Row("qwen3", "cp2 dp2, replicated optimizer", 4, CP | REPLICATED),
    Row("qwen3", "dp2, balanced by flops", 2, {}, batch=BY_FLOPS),
    Row("qwen3", "cp2 dp2, balanced by flops", 4, CP, batch=BY_FLOPS),
    Row("qwen3", "dp2, larger packs for scores", 2, {}, batch=WIDE_SCORES),
    Row("qwen3", "tp2 sp cp2, larger packs for scores", 4, SP | CP, batch=WIDE_SCORES),
    Row("qwen3", "pp2, larger packs for scores", 2, PP, batch=WIDE_SCORES),
    Row(DEEP, "pp4", 4, {"pipeline_model_parallel_size": 4}),
    Row(DEEP, "pp2, 3 layers before 1", 2, PP | {"decoder_first_pipeline_num_layers": 3}),
    Row("qwen2 of 4 layers", "pp2, 1 layer before 3", 2, PP | {"decoder_last_pipeline_num_layers": 3}),
    Row(DEEP, "recompute uniform", 1, FULL | {"recompute_method": "uniform"}),
    Row(DEEP, "pp2, recompute block", 2, PP | FULL | {"recompute_method": "block"}),
    Row(DEEP, "tp2 sp, recompute selective", 2, SP | {"recompute_granularity": "selective"}),
    Row(DEEP, "cp2, recompute uniform", 2, CP | FULL | {"recompute_method": "uniform"}),
    Row("qwen3_moe of 4 layers", "ep2, recompute uniform", 2, EP | FULL | {"recompute_method": "uniform"}),
    Row(DEEP, "pp2 interleaved", 2, INTERLEAVED),
    Row("qwen2 of 4 layers", "pp2 interleaved, tp2 sp", 4, INTERLEAVED | SP),
    Row("qwen3_moe of 4 layers", "pp2 interleaved, ep2", 4, INTERLEAVED | EP),
    Row(DEEP, "pp2 interleaved, recompute block", 2, INTERLEAVED | FULL | {"recompute_method": "block"}),
    Row(DEEP, "pp2 interleaved, recompute selective", 2, INTERLEAVED | {"recompute_granularity": "selective"}),
    Row(DEEP, "pp2 interleaved", 2, INTERLEAVED, format="padded", batch=PADDED),
    Row(DEEP, "pp2 interleaved, cp2", 4, INTERLEAVED | CP),
    Row(
        DEEP, "pp2 interleaved, dp2, gathered while computing", 4, INTERLEAVED | OVERLAP, batch={"micro_batch_size": 2}
    ),
    Row(
        "qwen2 of 4 layers", "pp2 interleaved by layers", 2, PP | {"num_layers_per_virtual_pipeline_stage": 1}, batch={}
    ),
    Row(
        "qwen2 of 4 layers",
        "pp2 interleaved, tp2 sp, recompute uniform",
        4,
        INTERLEAVED | SP | FULL | {"recompute_method": "uniform"},
    ),
    Row(
        "qwen3",
        "dp2, rows padded to 4",
        2,
        {},
        format="padded",
        batch={"qkv_format": "bshd", "micro_batch_size": 2, "data_pad_size_multiplier": 4},
    ),
    Row("qwen3", "tp2 dp2, gathered while computing", 4, TP | OVERLAP),
    Row("qwen3_moe, weights not divided", "one rank", 1, {}),
    Row("qwen3_moe, weights not divided", "ep2", 2, EP),
    Row("qwen3", "dp2, gradients reduced while computing", 2, REPLICATED | {"overlap_grad_reduce": True}),
    Row("qwen3_moe", "ep2 edp2, gathered while computing", 4, EP | OVERLAP),
]


def has_experts(family: str) -> bool:
    """Whether a family's tiny model has routers."""
    return family.endswith("_moe") or family in ("deepseek_v3", "moonlight")


def layouts_of(family: str) -> dict[str, tuple[int, dict]]:
    """The grid's layouts for a family."""
    return EXPERT_LAYOUTS if has_experts(family) else DENSE_LAYOUTS


def all_rows() -> list[Row]:
    """The whole table: the grid, its bf16 rows, the variants."""
    rows = [
        Row(family, layout, ranks, parallel, format=form, batch=batch)
        for family in CONFIGS
        for form, batch in FORMATS.items()
        for layout, (ranks, parallel) in layouts_of(family).items()
    ]
    for family in CONFIGS:
        bf16_layouts = ("one rank", "tp2 sp ep2 etp1", "pp2") if has_experts(family) else ("one rank", "tp2 sp", "pp2")
        rows += [Row(family, layout, *layouts_of(family)[layout], bf16=True) for layout in bf16_layouts]
    return rows + VARIANTS + shared_rows()


def shared_rows() -> list[Row]:
    """Rows whose samples share their prompts: every family, the layouts without context parallelism, and variants."""
    rows = [
        Row(family, f"{layout}, shared prompts", ranks, parallel, batch=SHARED)
        for family in CONFIGS
        for layout, (ranks, parallel) in layouts_of(family).items()
        if "context_parallel_size" not in parallel
    ]
    return rows + [
        dataclasses.replace(row, layout=f"{row.layout}, shared prompts", batch=row.batch | SHARED)
        for row in VARIANTS
        if row.batch.get("use_dynamic_batch_size") and "context_parallel_size" not in row.parallel
    ]


#: Rows with shared prompts that every run of the tests has.
QUICK_SHARED = {
    "qwen3": ("tp2 sp pp2", "dp2, larger packs for scores"),
    "qwen3 of 4 layers": ("pp2 interleaved, recompute block",),
    "deepseek_v3": ("one rank",),
    "qwen3_moe": ("ep2 pp2",),
}


#: Layouts of the grid that every run of the tests has; the others carry the marker parity_table.
QUICK = {
    "dense": {"packed": ("one rank", "tp2 sp pp2", "tp2 dp2", "cp4"), "padded": ("tp2 sp cp2", "pp2 dp2")},
    "experts": {
        "packed": ("one rank", "tp2 sp ep2 etp2", "ep2 pp2", "cp2 ep2"),
        "padded": ("tp2 sp ep2 etp1", "ep2 edp2"),
    },
}


def is_quick(row: Row) -> bool:
    """Whether a row runs by default: the variants, and some layouts of each family; of bf16 those on one rank."""
    if row.shares:
        return row.layout.removesuffix(", shared prompts") in QUICK_SHARED.get(row.model, ())
    if row.model not in CONFIGS or row.layout not in layouts_of(row.model):
        return True
    return row.layout in QUICK["experts" if has_experts(row.model) else "dense"][row.format] and (
        not row.bf16 or row.ranks == 1
    )


def make_models(root: str, rows: list[Row]) -> dict[str, str]:
    """model and "reference of " model -> HF folder, for the models of these rows.

    Two layers where a row says nothing else.
    """
    from tests.helpers.tiny_models import make_tiny_model

    folders = {}
    for number, model in enumerate(sorted({row.model for row in rows})):
        options = {"num_layers": 2} | MODELS[model]
        folders[model] = make_tiny_model(f"{root}/{number}", **options)
        folders["reference of " + model] = make_tiny_model(f"{root}/{number}-reference", **options, seed=1)
    return folders
