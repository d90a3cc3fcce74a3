"""What a weight sync has to know of Megatron: where this rank stands among those that gather, and the names of all that
is sent.

The sync itself is weight_sync.session's. Every pipeline stage sends at the same time, from one source rank (to a
folder: from several); to engines on the trainer's own cards every rank sends everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from megatron.core import parallel_state

from slime_like.config.model import ModelConfig
from slime_like.config.run import RunConfig
from slime_like.megatron_backend.hf.names_and_shards import hf_names, num_export_ranks, rank_in_stage
from slime_like.megatron_backend.hf.stages import of_every_stage
from slime_like.megatron_backend.lora.peft_files import adapter_names, peft_config, stream_adapters
from slime_like.records import BASE, WeightsRef
from slime_like.weight_sync.ranks import RankPlace
from slime_like.weight_sync.sender import Gathering
from slime_like.weight_sync.session import PublishOrder
from slime_like.weight_sync.shared_weights import SharedWeights
from slime_like.weight_sync.transports.slots import slot_bytes


def rank_place(*, by_card: bool = False) -> RankPlace:
    """This rank's. by_card: each rank is a source of its own (session.PublishOrder.cards)."""
    if by_card:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return RankPlace(source=rank, num_sources=world_size, rank_in_source=0, num_gatherers=1)
    return RankPlace(
        source=parallel_state.get_pipeline_model_parallel_rank(),
        num_sources=parallel_state.get_pipeline_model_parallel_world_size(),
        rank_in_source=rank_in_stage(),
        num_gatherers=num_export_ranks(),
    )


class Exports(Protocol):
    """A rank whose weights are sent (worker.TrainWorker)."""

    config: RunConfig
    stage: Sequence[torch.nn.Module]
    master_address: str

    def export(self, weights: WeightsRef) -> Iterator[tuple[str, torch.Tensor]]:
        """This pipeline stage's tensors under their HF names."""


def gathering_for(rank: Exports, order: PublishOrder, *, shared: SharedWeights | None) -> Gathering:
    """What this rank has to send by the order: its base, or adapters alone. shared: as in gathering()."""
    config, master_address = rank.config, rank.master_address
    if config.sync.sends_adapters:
        return gathering_of_adapters(rank.stage, config, master_address=master_address)
    return gathering(
        config.model,
        lambda: rank.export(BASE),
        master_address=master_address,
        whole_bytes=slot_bytes(config.sync.update_weight_buffer_size) if order.cards else None,
        shared=shared,
    )


def gathering(
    model: ModelConfig,
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    *,
    master_address: str,
    whole_bytes: int | None = None,
    shared: SharedWeights | None = None,
) -> Gathering:
    """What this rank has to send: its pipeline stage's tensors, which `tensors` gives as hf_convert.export_hf does.

    whole_bytes: every rank gathers all stages' tensors instead, in buckets of so many bytes from stage to stage.
    shared: memory of these tensors that engines map, if they are in such.
    """
    everything = tensors if whole_bytes is None else lambda: of_every_stage(tensors(), whole_bytes)
    return Gathering(
        place=rank_place(by_card=whole_bytes is not None),
        tensors=everything,
        names=frozenset(hf_names(model)),
        master_address=master_address,
        shared=shared,
    )


def gathering_of_adapters(stage: Sequence[torch.nn.Module], config: RunConfig, *, master_address: str) -> Gathering:
    """What this rank has to send where only adapters travel: its pipeline stage's, under PEFT's names."""
    assert config.adapters is not None, "the flags are checked: --lora-rank"
    return Gathering(
        place=rank_place(),
        tensors=lambda: stream_adapters(stage),
        names=adapter_names(config.adapters, config.model),
        master_address=master_address,
        adapter_config=peft_config(config.adapters, config.model, config.checkpoint.hf_checkpoint),
    )
