"""What layers keep beside their weights (`_extra_state`): transformer-engine's have it, empty unless they train in fp8,
and which of them differs from the torch layers. A checkpoint of either kind is read by the other.
"""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import FileSystemReader

from slime_like.errors import CheckpointError
from slime_like.megatron_backend.model.stage_weights import is_adapters

_EXTRA_STATE = "_extra_state"


def without_absent_layer_state(sharded: dict, folder: str) -> dict:
    """`sharded` without the layers' own state that the checkpoint in `folder` does not have: Megatron (0.16.1) would
    fail for it. Weights stay asked for.

    folder: a checked copy, whose index is safe to read (reader.checked_copy).
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata

    def is_absent(leaf) -> bool:
        return isinstance(leaf, ShardedObject) and _EXTRA_STATE in leaf.key and leaf.unique_key not in saved

    return extract_matching_values(sharded, is_absent)[1]


def load_weights(chunk: torch.nn.Module, state: dict) -> None:
    """chunk.load_state_dict(state) that is strict about weights, but not about the layers' own state.

    Layers whose state is absent keep the one that they were made with.
    Raises CheckpointError naming what is missing or has no place.
    """
    result = chunk.load_state_dict(state, strict=False)
    for names, what in (
        (result.missing_keys, "has no"),
        (result.unexpected_keys, "has, but the model has no place for,"),
    ):
        weights = [name for name in names if _EXTRA_STATE not in name and not is_adapters(name)]
        if weights:
            raise CheckpointError(f"the checkpoint {what} {weights[0]!r} ({len(weights)} of the tensors in all).")
