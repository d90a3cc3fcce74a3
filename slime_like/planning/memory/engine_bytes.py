"""What one GPU of a rollout engine holds: weights, KV cache, working memory.

Estimates of SGLang's layout; of its quantisations those of --rollout-quantization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from slime_like.config.adapter_rules import versions_at_once
from slime_like.config.lora import ALL_LINEAR, LoraConfig, adapter_flags
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.quantisation import scheme_of
from slime_like.config.run import RunConfig
from slime_like.planning.hardware import GIB, PROCESS_BYTES
from slime_like.planning.memory.activations import ActivationSizes
from slime_like.planning.memory.adapters import adapter_chunks
from slime_like.planning.memory.eight_bits import element_bytes
from slime_like.planning.memory.parameters import Parameter, stage_parameters
from slime_like.planning.memory.trainer_bytes import Precision

#: SGLang 0.5.23 (memory_hook.py) keeps at least this free on cards above 60 GiB, without --sglang-mem-fraction-static.
_RESERVE_BYTES = 10 * GIB
#: On smaller cards its reserve depends on many things; this is the order of it.
_RESERVE_SHARE = 0.12
#: CUDA graphs and the workspaces of attention kernels, which an engine keeps when it gives back weights and cache.
#: SGLang's own reckoning of the graphs is 512 MiB and 2 MiB for each of up to 256 batch sizes (memory_hook.py); an H100
#: held 1.4 GiB in all beside the process's 1 GiB (benchmarks/results/gpu-h100.md).
_GRAPH_BYTES = int(1.4 * GIB)
_PREFILL_TOKENS = 8192
#: SGLang's own default of --sglang-max-loras-per-batch.
_ADAPTERS_A_BATCH = 8

#: Kept whole on every tensor parallel rank.
_WHOLE = ("layernorm", "router", "q_down_proj", "kv_down_proj", "gate_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """One GPU of an engine.

    kv_cache is what --sglang-mem-fraction-static leaves beside the weights and the room for adapters; below 0 the
    engine cannot start.
    share: that flag's value.
    """

    weights: int
    adapters: int
    kv_cache: int
    graphs: int
    work: int
    share: float


def mem_fraction(config: RunConfig, card: int) -> float:
    """Share of the card for weights and KV cache: --sglang-mem-fraction-static, else SGLang's default."""
    setting = config.engine.sglang.get("mem_fraction_static")
    if isinstance(setting, str):
        return float(setting)
    reserve = _RESERVE_BYTES if card > 60 * GIB else _RESERVE_SHARE * card
    return 1 - reserve / card


def colocated_share(config: RunConfig, card: int, beside: Mapping[str, int], work: int) -> float:
    """--sglang-mem-fraction-static of an engine that shares its card with training roles, rounded down to 1/1000.

    beside: most bytes of those roles on one card, by phase; work: the engine's beside weights, cache, graphs. SGLang
    takes the flag of what is free when it starts (kv_cache_configurator.py, 0.5.23), which is when training roles are
    built and, with --offload-train, have left the card. Static memory must fit beside them in every phase in which it
    is there, and leave SGLang its own reserve.
    """
    free = card - beside["start"]
    if free <= 0:
        return 0.0
    phases = [phase for phase in beside if phase in ("start", "generate") or not config.offload_rollout]
    own = PROCESS_BYTES + _GRAPH_BYTES
    room = min(card - beside[phase] - own - (work if phase == "generate" else 0) for phase in phases)
    return max(0, int(1000 * min(room / free, mem_fraction(config, free)))) / 1000


def engine_bytes(config: RunConfig, card: int, beside: Mapping[str, int] | None = None) -> EngineBytes:
    """The fullest GPU of an engine. beside: most bytes of training roles on its card, by phase; None: it is alone."""
    width, tp, pp = Precision.of(config.optimizer).weight, config.engine_tp_size, config.engine_pp_size
    attention_tp = max(1, tp // config.engine_dp_size) if config.engine.dp_attention else tp
    scheme = scheme_of(config.sync.rollout_quantization)
    weights = engine_elements(
        config.model,
        tp=tp,
        attention_tp=attention_tp,
        pp=pp,
        weigh=lambda parameter: element_bytes(parameter, width=width, scheme=scheme),
    )
    sizes = ActivationSizes(model=config.model, parallel=ParallelConfig(tensor_model_parallel_size=tp), width=width)
    tokens = config.engine.sglang.get("chunked_prefill_size")
    prefill = int(tokens) if isinstance(tokens, str) and int(tokens) > 0 else _PREFILL_TOKENS
    work = int(prefill * sizes.forward_only())
    free = card - (beside or {}).get("start", 0)
    share = mem_fraction(config, card)
    if beside is not None and not has_share(config):
        share = colocated_share(config, card, beside, work)
    adapters = width * _adapter_elements(config)
    cache = int(share * free) - weights - adapters
    return EngineBytes(weights=weights, adapters=adapters, kv_cache=cache, graphs=_GRAPH_BYTES, work=work, share=share)


def _adapter_elements(config: RunConfig) -> int:
    """Elements of the room that a rank keeps for adapters, whether there are any: of the largest rank for each in a
    batch and the base (SGLang 0.5.23, lora/mem_pool.py). 0 for an engine that serves none.
    """
    settings = config.engine.sglang
    if config.sync.sends_adapters:
        settings = adapter_flags(config.lora, config.model, num_versions=versions_at_once(config)) | settings
    if not settings.get("enable_lora") or "max_lora_rank" not in settings:
        return 0  # without a rank SGLang finds out from --sglang-lora-paths
    chosen = settings.get("lora_target_modules", "all")
    modules = chosen if isinstance(chosen, list) and "all" not in chosen else [ALL_LINEAR]
    none = [r".*\.experts\..*"] if config.model.num_experts else None  # it serves none on experts
    rank = int(str(settings["max_lora_rank"]))
    lora = LoraConfig(lora_rank=rank, lora_target_modules=modules, lora_exclude_modules=none)
    layout = ParallelConfig(tensor_model_parallel_size=config.engine_tp_size)
    elements = sum(p.numel for chunk in adapter_chunks(config.model, layout, 0, lora) for p in chunk)
    return int(str(settings.get("max_loras_per_batch", _ADAPTERS_A_BATCH))) * elements // config.engine_pp_size


def has_share(config: RunConfig) -> bool:
    """Whether --sglang-mem-fraction-static was given."""
    return isinstance(config.engine.sglang.get("mem_fraction_static"), str)


def engine_elements(
    model: ModelConfig,
    *,
    tp: int,
    attention_tp: int,
    pp: int,
    weigh: Callable[[Parameter], float] = lambda parameter: 1.0,
) -> int:
    """Elements of the model on the fullest rank: matrices divided, fewer key/value heads than ranks repeated, norms and
    routers whole. weigh: what each element of a tensor counts, such as its bytes.
    """
    experts = model.num_experts or 1
    # One expert stands for all of them: a list of 256 in each layer would cost seconds.
    layout = ParallelConfig(expert_model_parallel_size=experts)
    repeated = max(1.0, attention_tp / model.num_kv_heads) if not model.multi_latent_attention else 1.0
    keys = 2 * model.num_kv_heads / (model.num_attention_heads + 2 * model.num_kv_heads)
    layers = ends = 0.0
    for parameter in stage_parameters(model, layout, 0):
        name, size = parameter.name, parameter.numel * weigh(parameter)
        if ".experts." in name:
            size *= experts / tp
        elif not any(part in name for part in _WHOLE):
            size /= attention_tp if ".self_attention." in name else tp
            if "linear_qkv" in name:
                size *= 1 + keys * (repeated - 1)
        if name.startswith("decoder.layers."):
            layers += size
        else:
            ends = max(ends, size) if pp > 1 else ends + size
    return int(layers * -(-model.num_layers // pp) / model.num_layers + ends)
