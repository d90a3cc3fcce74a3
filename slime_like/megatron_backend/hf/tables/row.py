"""One row of a name table."""

from __future__ import annotations

import dataclasses

#: How HF tensors make up one Megatron tensor. GATE_UP_JOINED: gate and up are halves of one HF tensor too.
PLAIN, QKV, GATE_UP, GATE_UP_JOINED = "plain", "qkv", "gate_up", "gate_up_joined"

_MLP = "decoder.layers.{layer}.mlp."


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """One Megatron tensor and the HF tensors that it is made of.

    `{layer}` stands for the layer's number; `{expert}` for the expert's, in `hf` among all, in `megatron` among this
    rank's.

    Example: WeightRow("decoder.layers.{layer}.mlp.linear_fc1.weight", ("model.layers.{layer}.mlp.gate_proj.weight",
    "…up_proj.weight"), GATE_UP)
    """

    megatron: str  # name with our torch layer parts
    hf: tuple[str, ...]
    layout: str = PLAIN
    transformer_engine: str | None = None  # name with transformer-engine's fused layers, where it differs
    #: Every tensor parallel rank holds all of it. transformer-engine (2.9 to 2.20) marks every matrix as split.
    duplicated: bool = False

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """Every name that the tensor may have."""
        return (self.megatron,) if self.transformer_engine is None else (self.megatron, self.transformer_engine)

    def is_in_layer(self, *, has_experts: bool) -> bool:
        """Whether a layer with or without experts has this tensor."""
        if not self.megatron.startswith(_MLP):
            return True
        return has_experts != self.megatron.startswith(_MLP + "linear_fc")
