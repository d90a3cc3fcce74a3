"""How weights become eight bits for the engines (--rollout-quantization): one row for each scheme, read by config,
plan, trainer and engines' side alike. No torch.

A scheme says what replaces `X.weight` of a linear layer: the same name in eight bits, and beside it its scales.
Whatever is no linear layer (norms, embeddings, output layer, routers) is sent as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: HF names of the matrices that become eight bits: attention and MLP projections, experts among them.
LINEAR = re.compile(
    r"\.(?:self_attn\.(?:[qkvo]|q_a|q_b|kv_b)_proj|self_attn\.kv_a_proj_with_mqa"
    r"|mlp\.(?:experts\.\d+\.|shared_experts\.)?(?:gate|up|down)_proj)\.weight$"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Eight-bit weights: their type, and how many of them share a scale.

    rows, columns: of the block that shares one fp32 scale; 0: all of them.
    """

    name: str
    weight_dtype: str  # torch's name of it
    largest: float  # the largest number of that type
    scale_suffix: str  # appended to the weight's name
    rows: int
    columns: int
    engine_config: Mapping[str, Any]  # what engines are told as the checkpoint's `quantization_config`

    def scale_shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Of the scales of a matrix: [blocks down, blocks across]."""
        down = -(-num_rows // self.rows) if self.rows else 1
        across = -(-num_columns // self.columns) if self.columns else 1
        return down, across


#: --rollout-quantization.
SCHEMES: Mapping[str, QuantScheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            QuantScheme(
                name="int8",
                weight_dtype="int8",
                largest=127.0,
                scale_suffix="_scale",
                rows=1,
                columns=0,
                engine_config=MappingProxyType(
                    {"quant_method": "w8a8_int8", "is_dynamic": True, "ignore": ["lm_head"]}
                ),
            ),
            QuantScheme(
                name="fp8",
                weight_dtype="float8_e4m3fn",
                largest=448.0,
                scale_suffix="_scale_inv",
                rows=128,
                columns=128,
                engine_config=MappingProxyType(
                    {
                        "quant_method": "fp8",
                        "fmt": "e4m3",
                        "activation_scheme": "dynamic",
                        "weight_block_size": [128, 128],
                    }
                ),
            ),
        )
    }
)
