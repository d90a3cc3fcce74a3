"""Megatron checkpoints (torch_dist): written whole or not at all, readable under another parallel layout.

<folder>/latest_checkpointed_iteration.txt    "12", Megatron's tracker
<folder>/iter_0000012/                        torch_dist shards, and client_state.json with a list of every file's size
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.model_provider import unwrap
from slime_like.megatron_backend.optimizer import fit_optimizer_state
from slime_like.megatron_backend.value_head import OUTPUT_WEIGHT
from slime_like.utils.files import write_atomic

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "client_state.json"
#: Parameter-shaped optimizer state, readable under any layout. (dp_reshardable is silently wrong with torch AdamW in 0.16.1.)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything of one rank that a checkpoint holds."""

    model: torch.nn.Module
    model_config: ModelConfig
    optimizer: MegatronOptimizer | None = None  # None: leave optimizer state out
    scheduler: OptimizerParamScheduler | None = None  # None: take weights only
    with_rng: bool = True
    value_head: bool = False  # a critic; loading a policy's weights leaves its head as it is


def is_megatron_folder(folder: str) -> bool:
    """Whether anything in the folder claims to be a Megatron checkpoint."""
    return os.path.isdir(folder) and (os.path.isfile(os.path.join(folder, TRACKER)) or bool(_iterations(folder)))


def latest(folder: str) -> str:
    """Path of the newest checkpoint. Raises CheckpointError if there is none, or if it is torn."""
    tracker = os.path.join(folder, TRACKER)
    if os.path.isfile(tracker):
        with open(tracker, encoding="utf-8") as file:
            text = file.read().strip()
        if not text.isdigit():
            raise CheckpointError(f"{tracker} holds {text!r}, not the number of a checkpoint.")
        path = os.path.join(folder, _folder_name(int(text)))
    elif _iterations(folder):
        # The rename happened and the tracker's writing did not: a folder with its final name is complete.
        path = os.path.join(folder, _folder_name(max(_iterations(folder))))
    else:
        raise CheckpointError(f"{folder} holds no Megatron checkpoint: neither {TRACKER} nor an iter_ folder.")
    read_client_state(path)
    return path


def read_client_state(path: str) -> dict:
    """client_state.json of one checkpoint, after checking that every file it lists is there in full. Raises CheckpointError."""
    state_path = os.path.join(path, STATE_FILE)
    try:
        with open(state_path, encoding="utf-8") as file:
            state = json.load(file)
        sizes = state["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: {state_path} cannot be read ({error!r}). Fix: write an older number into {TRACKER}, or remove the folder."
        ) from None
    for name, size in sizes.items():
        file_path = os.path.join(path, name)
        found = os.path.getsize(file_path) if os.path.isfile(file_path) else None
        if found != size:
            raise CheckpointError(
                f"{file_path} is {'missing' if found is None else f'{found} bytes long'}, but was written with {size}: the checkpoint is torn. "
                f"Fix: write an older number into {TRACKER}, or restore the file."
            )
    return state


def save(folder: str, state: TrainState, *, num_rollouts_done: int, client_state: dict) -> str:
    """Write one checkpoint and make it the latest; returns its path. Collective. client_state must be JSON.

    Everything is written into a neighbouring folder first; the rename makes it a checkpoint.
    """
    final = os.path.join(folder, _folder_name(num_rollouts_done))
    draft = os.path.join(folder, f".{_folder_name(num_rollouts_done)}.tmp")
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        shutil.rmtree(draft, ignore_errors=True)
        os.makedirs(draft)
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded_state(state, is_loading=False), draft)
    torch.distributed.barrier()
    if is_first:
        record = {
            "num_rollouts_done": num_rollouts_done,
            "client_state": client_state,
            "architecture": _architecture(state.model_config),
            "layout": _layout(),
            "has_optimizer": state.optimizer is not None,
            "value_head": state.value_head,
            "files": {entry.name: entry.stat().st_size for entry in os.scandir(draft)},
        }
        write_atomic(os.path.join(draft, STATE_FILE), json.dumps(record, indent=1))
        swap_in(draft, final)
        write_atomic(os.path.join(folder, TRACKER), str(num_rollouts_done))
    torch.distributed.barrier()
    return final


def load(path: str, state: TrainState) -> dict:
    """Fill the parts of `state` that are given from one checkpoint; returns its client_state.json. Collective.

    Random states are taken only under the layout that saved them (they belong to ranks). Raises CheckpointError.
    """
    saved = read_client_state(path)
    wanted, found = _architecture(state.model_config), saved.get("architecture")
    if found != wanted:
        differing = [f"{k}: checkpoint {(found or {}).get(k)}, flags {wanted[k]}" for k in wanted if (found or {}).get(k) != wanted[k]]
        raise CheckpointError(f"{path} is of another architecture: {'; '.join(differing)}.")
    from_policy = state.value_head and not saved.get("value_head", False)
    if not state.value_head and saved.get("value_head", False) or from_policy and state.optimizer is not None:
        raise CheckpointError(f"{path} is a {'policy' if from_policy else 'critic'}'s and cannot continue as a {'critic' if from_policy else 'policy'}.")
    if state.optimizer is not None and not saved["has_optimizer"]:
        raise CheckpointError(f"{path} has no optimizer state (it was saved with --no-save-optim). Fix: --no-load-optim.")
    if saved["layout"] != _layout():
        state = dataclasses.replace(state, with_rng=False)
    sharded = _sharded_state(state, is_loading=True)
    own_head = sharded["model"].pop(OUTPUT_WEIGHT, None) if from_policy else None
    try:
        loaded = dist_checkpointing.load(sharded, path)
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if own_head is not None:
        loaded["model"][OUTPUT_WEIGHT] = own_head.data
    unwrap(state.model).load_state_dict(loaded["model"])
    if state.optimizer is not None:
        state.optimizer.load_state_dict(fit_optimizer_state(loaded["optimizer"], state.optimizer))
    if state.scheduler is not None:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if state.with_rng:
        _set_rng(loaded["rng_state"])
    return saved


def _sharded_state(state: TrainState, *, is_loading: bool) -> dict:
    sharded: dict = {"model": unwrap(state.model).sharded_state_dict()}
    if state.optimizer is not None:
        sharded["optimizer"] = state.optimizer.sharded_state_dict({"model": sharded["model"]}, is_loading=is_loading, metadata=_METADATA)
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
    return {name: getattr(model, name) for name in _ARCHITECTURE + (_EXPERTS if model.num_experts else ())}


def _layout() -> list[int]:
    """[tensor, pipeline, data] parallel sizes; a list, as JSON gives it back."""
    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]


def _folder_name(number: int) -> str:
    return f"iter_{number:07d}"


def _iterations(folder: str) -> list[int]:
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir()) if os.path.isdir(folder) else ()
    return [int(name[5:]) for name in names if name.startswith("iter_") and name[5:].isdigit()]


def swap_in(draft: str, final: str) -> None:
    """Give the finished folder its name; one of the same name (a step done again after a resume) makes way."""
    old = draft + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(final):
        os.rename(final, old)
    os.rename(draft, final)
    shutil.rmtree(old, ignore_errors=True)
