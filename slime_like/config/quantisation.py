"""How weights become eight bits for the engines (--rollout-quantization): one row for each scheme, read by config,
plan, trainer and engines' side alike. No torch.

A scheme says what replaces `X.weight` of a linear layer: the same name in eight bits, and beside it its scales.
Whatever is no linear layer (norms, embeddings, output layer, routers) is sent as it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: HF names of the matrices that become eight bits: attention and MLP projections, experts among them.
LINEAR = re.compile(
    r"\.(?:self_attn\.(?:[qkvo]|q_a|q_b|kv_b)_proj|self_attn\.kv_a_proj_with_mqa"
    r"|mlp\.(?:experts\.\d+\.|shared_experts\.)?(?:gate|up|gate_up|down)_proj)\.weight$"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Eight-bit weights: their type, and how many of them share a scale.

    rows, columns: of the block that has one fp32 scale; 0: all of them. one_scale: all blocks of a matrix have the same
    one.
    """

    name: str
    weight_dtype: str  # torch's name of it
    largest: float  # the largest number of that type
    scale_suffix: str  # appended to the weight's name
    rows: int
    columns: int
    engine_config: Mapping[str, Any]  # what engines are told as the checkpoint's `quantization_config`
    one_scale: bool = False

    def scale_shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Of the scales of a matrix: [blocks down, blocks across]."""
        down = -(-num_rows // self.rows) if self.rows else 1
        across = -(-num_columns // self.columns) if self.columns else 1
        return down, across


#: Rows and columns of a block of fp8.
BLOCK = 128
_FP8_BLOCKS = MappingProxyType(
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
)

#: The largest mean |log-prob difference| over a probe that is still rounding, twice what was measured: int8 of a real
#: model of 135M parameters 0.33 and 0.46, of which transformers with the same products say 0.39 and 0.44 (of weights
#: alone 0.13); other weights of its shape give 3.5 and more.
PROBE_TOLERANCE = 1.0

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
                rows=BLOCK,
                columns=BLOCK,
                engine_config=_FP8_BLOCKS,
            ),
            # In the form of blocks: stock engines that keep one number a matrix pack weights when they have loaded
            # them, and die of the second update (0.5.23, quantization/fp8.py).
            QuantScheme(
                name="fp8-per-tensor",
                weight_dtype="float8_e4m3fn",
                largest=448.0,
                scale_suffix="_scale_inv",
                rows=BLOCK,
                columns=BLOCK,
                engine_config=_FP8_BLOCKS,
                one_scale=True,
            ),
        )
    }
)
#: --rollout-quantization without it.
NONE = "none"
#: What a user may not set beside it: engines get it from here.
ENGINE_FLAGS = ("quantization", "load_format")
_OVERRIDES, _CONFIG = "json_model_override_args", "quantization_config"
#: Where a config.json says that its weights are in eight bits.
STORED_CONFIGS = (_CONFIG, "compression_config")


def scheme_of(name: str) -> QuantScheme | None:
    """The row that --rollout-quantization names; None: engines keep what the trainer has."""
    return None if name == NONE else SCHEMES[name]


def engine_flags(scheme: QuantScheme, given: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's arguments of an engine that is sent this scheme, merged with the user's own (underscored names).

    Its weights are made up until the first sync: no quantised checkpoint is needed, and none of full size is read.
    """
    overrides = json.loads(given.get(_OVERRIDES) or "{}") | {_CONFIG: dict(scheme.engine_config)}
    return {"load_format": "dummy", _OVERRIDES: json.dumps(overrides)}


def plain_flags(hf: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's arguments of an engine that is sent plain weights although its checkpoint is in eight bits; none for a
    plain one. It would take them for what they are not, and say nothing.

    hf: the checkpoint's config.json.
    """
    stored = [key for key in STORED_CONFIGS if hf.get(key)]
    if not stored:
        return {}
    overrides = json.loads(given.get(_OVERRIDES) or "{}") | dict.fromkeys(stored)
    return {"load_format": "dummy", _OVERRIDES: json.dumps(overrides)}


def served_config(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` that an engine was started with, or its checkpoint's where that can be read from here;
    None: without one.

    info: its /server_info.
    """
    overrides = json.loads(info.get(_OVERRIDES) or "{}")
    if _CONFIG in overrides:
        return overrides[_CONFIG]
    path = os.path.join(str(info.get("model_path") or ""), "config.json")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file).get(_CONFIG)


def is_served(scheme: QuantScheme, config: Mapping[str, Any] | None) -> bool:
    """Whether an engine with this `quantization_config` keeps what the scheme sends."""
    ours = scheme.engine_config
    keys = ("quant_method", "weight_block_size")
    return config is not None and all(config.get(key) == ours.get(key) for key in keys)


def given_problems(given: Mapping[str, Any]) -> list[str]:
    """What of --sglang-* does not go with --rollout-quantization."""
    problems = [
        f"--sglang-{name.replace('_', '-')} {given[name]} does not go with --rollout-quantization, which sets it. Fix:"
        " drop one of them."
        for name in ENGINE_FLAGS
        if name in given
    ]
    try:
        overrides = json.loads(given.get(_OVERRIDES) or "{}")
        if not isinstance(overrides, dict):
            raise ValueError("no object")
    except (TypeError, ValueError) as error:
        return [*problems, f"--sglang-json-model-override-args {given[_OVERRIDES]}: is no JSON object ({error})."]
    if _CONFIG in overrides:
        problems.append(
            f"--sglang-json-model-override-args has a {_CONFIG}, which --rollout-quantization sets. Fix: drop one of"
            " them."
        )
    return problems
