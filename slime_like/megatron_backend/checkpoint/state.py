"""Megatron checkpoints (torch_dist): written whole or not at all, readable under another parallel layout."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint.agreement import agreed
from slime_like.megatron_backend.checkpoint.folder import Draft, damage, read_client_state
from slime_like.megatron_backend.checkpoint.layer_state import load_weights, without_absent_layer_state
from slime_like.megatron_backend.checkpoint.reader import checked_copy
from slime_like.megatron_backend.lora.peft_files import save_adapters
from slime_like.megatron_backend.lora.state import adapter_record, check_record, sharded_adapters, take_adapters
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.megatron_backend.model.stage_weights import is_adapters
from slime_like.megatron_backend.model.value_head import OUTPUT_WEIGHT
from slime_like.megatron_backend.step.optimizer import fit_optimizer_state

#: What writing may raise; torch's CheckpointException is a BaseException.
WRITE_FAILURES = (Exception, CheckpointException)
#: Parameter-shaped optimizer state, readable under any layout. (dp_reshardable is silently wrong with torch AdamW in
#: 0.16.1.)
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
#: What must agree between a checkpoint and the model it is loaded into.
_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "mlp_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
_EXPERTS = ("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")
#: What only some families have: told where it is not the default.
_FAMILY = (
    *("post_self_attn_layernorm", "post_mlp_layernorm", "rotary_interleaved", "rotary_percent"),
    *(
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size",
        "moe_router_topk_scaling_factor",
    ),
    *("moe_router_num_groups", "moe_router_group_topk"),
    *(
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rotary_scaling_factor",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything of one rank that a checkpoint holds."""

    model: Sequence[torch.nn.Module]  # this rank's chunks
    model_config: ModelConfig
    optimizer: MegatronOptimizer | None = None  # None: leave optimizer state out
    scheduler: OptimizerParamScheduler | None = None  # None: take weights only
    with_rng: bool = True
    value_head: bool = False  # a critic; loading a policy's weights leaves its head as it is
    lora: LoraConfig | None = None  # only adapters, which are also written as a PEFT folder; None: the model
    verify: bool = True  # what is loaded is compared with its digests
    base: str | None = None  # of adapters: the folder of the model that they are for


def draft_of(
    folder: str,
    state: TrainState,
    *,
    num_rollouts_done: int | None,
    client_state: dict,
    keeps: CheckpointConfig | None = None,
    num_spared: int = 0,
) -> Draft:
    """The checkpoint-to-be of `state` in `folder`.

    client_state must be JSON. keeps: which earlier ones stay (None: all). num_rollouts_done None: converted weights,
    which resume nothing.
    """
    record = {
        "num_rollouts_done": num_rollouts_done or 0,
        "client_state": client_state,
        "architecture": _architecture(state.model_config),
        "layout": _layout(),
        "dtype": str(next(state.model[0].parameters()).dtype).removeprefix("torch."),
        "has_optimizer": state.optimizer is not None,
        "weights_only": state.scheduler is None,
        "value_head": state.value_head,
    }
    if state.lora is not None:
        record["lora"] = adapter_record(state.lora, state.model_config)
    return Draft(
        folder=folder,
        number=num_rollouts_done,
        record=record,
        retain_interval=keeps.save_retain_interval if keeps else None,
        total_limit=keeps.save_total_limit if keeps else None,
        num_spared=num_spared,
    )


def start_writing(draft: Draft, state: TrainState) -> AsyncRequest:
    """Make the hidden folder, and Megatron's request to write into it. Collective. Raises SaveError on every rank if
    there is no room.
    """
    agreed(draft.what, draft.make)
    request = dist_checkpointing.save(_sharded_state(state, is_loading=False), draft.path, async_sharded_save=True)
    if state.lora is not None:
        save_adapters(unwrap(state.model), draft.path, lora=state.lora, model=state.model_config, base=state.base)
    torch.distributed.barrier()
    assert request is not None, "Megatron makes a request when it is asked to write later"
    return request


def finish_writing(draft: Draft, digests: dict[str, str]) -> None:
    """Turn what all ranks have written into the latest checkpoint. Collective. digests: of this rank's shards."""
    of_ranks: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, digests)
    agreed(draft.what, lambda: draft.publish({name: digest for one in of_ranks for name, digest in one.items()}))


def load(path: str, state: TrainState) -> dict:
    """Fill the parts of `state` that are given from one checkpoint; returns its client_state.json. Collective.

    Random states are taken only under the layout that saved them (they belong to ranks). Each rank first
    compares its share of the files with their digests. Raises CheckpointError.
    """
    saved = read_client_state(path)
    if state.verify:
        _check_digests(path)
    ours, recorded = _architecture(state.model_config), saved.get("architecture")
    if recorded != ours:
        theirs = recorded or {}
        differing = [
            f"{k}: checkpoint {theirs.get(k)}, flags {ours.get(k)}"
            for k in ours | theirs
            if theirs.get(k) != ours.get(k)
        ]
        raise CheckpointError(f"{path} is of another architecture: {'; '.join(differing)}.")
    from_policy = state.value_head and not saved.get("value_head", False)
    if not state.value_head and saved.get("value_head", False) or from_policy and state.optimizer is not None:
        raise CheckpointError(
            f"{path} is a {'policy' if from_policy else 'critic'}'s and cannot continue as a"
            f" {'critic' if from_policy else 'policy'}."
        )
    check_record(path, saved.get("lora"), state.lora, state.model_config)
    if state.optimizer is not None and not saved["has_optimizer"]:
        raise CheckpointError(
            f"{path} has no optimizer state (it was saved with --no-save-optim). Fix: --no-load-optim."
        )
    if saved["layout"] != _layout():
        state = dataclasses.replace(state, with_rng=False)
    sharded = _sharded_state(state, is_loading=True)
    chunks = dict(zip(_chunk_names(state.model), unwrap(state.model), strict=True))
    last = list(chunks)[-1]
    own_head = sharded[last].pop(OUTPUT_WEIGHT, None) if from_policy and state.lora is None else None
    with checked_copy(path, sharded) as copy:
        try:
            loaded = dist_checkpointing.load(without_absent_layer_state(sharded, copy), copy)
        except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
            raise CheckpointError(
                f"{path} cannot be loaded: {type(error).__name__}: {str(error).replace(copy, path)}"
            ) from error
    if own_head is not None:
        loaded[last][OUTPUT_WEIGHT] = own_head.data
    if state.lora is not None:
        take_adapters(unwrap(state.model), loaded["adapters"])
    for name, chunk in chunks.items() if state.lora is None else ():
        load_weights(chunk, loaded[name])
    if state.optimizer is not None:
        state.optimizer.load_state_dict(fit_optimizer_state(loaded["optimizer"], state.optimizer))
    if state.scheduler is not None:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if state.with_rng:
        _set_rng(loaded["rng_state"])
    return saved


def _check_digests(path: str) -> None:
    """Raises CheckpointError on every rank if a file is not what was written. Collective."""
    num_ranks = torch.distributed.get_world_size()
    damaged: list = [None] * num_ranks
    torch.distributed.all_gather_object(damaged, damage(path, rank=torch.distributed.get_rank(), num_ranks=num_ranks))
    names = sorted(name for one in damaged for name in one)
    if names:
        raise CheckpointError(
            f"{path}: {', '.join(names)} {'are' if len(names) > 1 else 'is'} not what was written: its digest is"
            " another. Fix: another copy of the checkpoint, an older one (--ckpt-step); or --no-verify-checkpoint,"
            " which takes it as it is."
        )


def _sharded_state(state: TrainState, *, is_loading: bool) -> dict:
    sharded = _sharded_weights(state)
    if state.optimizer is not None:
        sharded["optimizer"] = state.optimizer.sharded_state_dict(
            dict(sharded), is_loading=is_loading, metadata=_METADATA
        )
    if state.scheduler is not None:
        sharded["opt_param_scheduler"] = state.scheduler.state_dict()
    if state.with_rng:
        tensor, pipeline, data = _layout()
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        copy = parallel_state.get_context_parallel_rank()
        sharded["rng_state"] = ShardedObject("rng_state", _get_rng(), (tensor, pipeline, data), place, replica_id=copy)
    return sharded


def _sharded_weights(state: TrainState) -> dict:
    """What is trained: the chunks' state, or their adapters'."""
    if state.lora is not None:
        return {"adapters": sharded_adapters(unwrap(state.model))}
    return {
        name: {key: tensor for key, tensor in chunk.sharded_state_dict().items() if not is_adapters(key)}
        for name, chunk in zip(_chunk_names(state.model), unwrap(state.model), strict=True)
    }


def _chunk_names(model: Sequence[torch.nn.Module]) -> list[str]:
    """Megatron's names of the chunks' state.

    Tensors bear the numbers of the whole model's layers, so files do not depend on the chunks.
    """
    return ["model"] if len(model) == 1 else [f"model{number}" for number in range(len(model))]


def _get_rng() -> dict:
    state = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: dict) -> None:
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _architecture(model: ModelConfig) -> dict:
    fields = {name: getattr(model, name) for name in _ARCHITECTURE + (_EXPERTS if model.num_experts else ())}
    if model.num_experts and not all(model.expert_layers):
        fields["moe_layer_freq"] = "".join(str(int(has_experts)) for has_experts in model.expert_layers)
    return fields | {
        name: getattr(model, name) for name in _FAMILY if getattr(model, name) != getattr(ModelConfig, name)
    }


def _layout() -> list[int]:
    """[tensor, pipeline, data] parallel sizes; a list, as JSON gives it back."""
    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]
