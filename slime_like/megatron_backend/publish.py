"""What a weight sync has to know of Megatron: where this rank stands among those that gather, and the names of all that
is sent.

The sync itself is weight_sync.session's. Every pipeline stage sends at the same time, from one source rank (to a
folder: from several).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state

from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.hf.names_and_shards import hf_names, num_export_ranks, rank_in_stage
from slime_like.weight_sync.ranks import RankPlace
from slime_like.weight_sync.sender import Gathering


def rank_place() -> RankPlace:
    """This rank's."""
    return RankPlace(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        rank_in_stage=rank_in_stage(),
        num_gatherers=num_export_ranks(),
    )


def gathering(
    model: ModelConfig, tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]], *, master_address: str
) -> Gathering:
    """What this rank's pipeline stage has to send; `tensors` as hf_convert.export_hf gives them."""
    return Gathering(
        place=rank_place(), tensors=tensors, names=frozenset(hf_names(model)), master_address=master_address
    )
