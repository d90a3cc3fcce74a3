"""One linear layer with an adapter, without Megatron's groups: a tensor parallel group of one."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN
from slime_like.megatron_backend.hf.tables.row import PLAIN
from slime_like.megatron_backend.lora.adapter import AdapterPart, AdapterShape, AdapterSwitch, LoraAdapter
from slime_like.megatron_backend.lora.gains import added

#: What adapters read of Megatron's config. Heads of two channels.
CONFIG = types.SimpleNamespace(sequence_parallel=False, params_dtype=torch.float32, kv_channels=2)


@contextlib.contextmanager
def group_of_one() -> Iterator[torch.distributed.ProcessGroup]:
    """The world, of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def adapter_on(
    group, sizes: tuple[int, ...], names: dict[int, str], *, layout: str = PLAIN, num_inputs: int = 3, **flags
) -> tuple[LoraAdapter, AdapterSwitch]:
    """An adapter with random A and B. names: HF module of each place that has one."""
    lora = LoraConfig(**{"lora_rank": 2, "lora_alpha": 6.0} | flags)
    switch = AdapterSwitch(lora)
    shape = AdapterShape(
        split=COLUMN, layout=layout, sizes=sizes, num_inputs=num_inputs, rank=lora.lora_rank, scale=lora.scale,
        dropout=lora.lora_dropout, group=group,
    )  # fmt: skip
    parts = {place: AdapterPart(f"model.layers.0.{name}", shape, sizes[place], CONFIG) for place, name in names.items()}
    adapter = LoraAdapter(shape, parts, CONFIG, switch)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for matrix in adapter.parameters():
            matrix.copy_(torch.randn(matrix.shape, generator=generator))
    return adapter, switch


class Layer(torch.nn.Linear):
    """As Megatron's: gives its output and no bias."""

    def forward(self, hidden):
        return super().forward(hidden), None


def stage_with(adapter: LoraAdapter, num_inputs: int, num_outputs: int) -> torch.nn.ModuleList:
    """A chunk of one such layer."""
    linear = Layer(num_inputs, num_outputs, bias=False)
    linear.add_module("adapter", adapter)
    linear.register_forward_hook(added(adapter), with_kwargs=True)
    return torch.nn.ModuleList([torch.nn.Sequential(linear)])
