"""One row of a name table."""

from __future__ import annotations

import dataclasses

#: How HF tensors make up one Megatron tensor.
PLAIN, QKV, GATE_UP = "plain", "qkv", "gate_up"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors that it is made of.

    `{layer}` stands for the layer's number; `{expert}` for the expert's, in `hf` among all, in `megatron` among this rank's.

    Example: Entry("decoder.layers.{layer}.mlp.linear_fc1.weight", ("model.layers.{layer}.mlp.gate_proj.weight", "…up_proj.weight"), GATE_UP)
    """

    megatron: str  # name with our torch layer parts
    hf: tuple[str, ...]
    layout: str = PLAIN
    transformer_engine: str | None = None  # name with transformer-engine's fused layers, where it differs

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """Every name that the parameter may have."""
        return (self.megatron,) if self.transformer_engine is None else (self.megatron, self.transformer_engine)
