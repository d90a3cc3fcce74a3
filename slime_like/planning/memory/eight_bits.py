"""Bytes of what is sent to engines and held by them, where their linear layers are in eight bits
(--rollout-quantization).
"""

from __future__ import annotations

import dataclasses
import functools
import re

from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.quantisation import QuantScheme, scheme_of
from slime_like.planning.memory.parameters import Parameter, stage_parameters

#: Megatron's names of what config.quantisation.LINEAR matches among HF's.
_LINEAR = re.compile(r"\.linear_\w+\.weight$")
_SCALE_BYTES = 4


def element_bytes(parameter: Parameter, *, width: int, scheme: QuantScheme | None) -> float:
    """Bytes of one element in an engine, its share of the scales included. width: of one that is not quantised."""
    if scheme is None or not _LINEAR.search(parameter.name):
        return width
    down, across = scheme.scale_shape(*parameter.shape)
    return 1 + _SCALE_BYTES * down * across / parameter.numel


@functools.lru_cache(maxsize=8)
def model_bytes(model: ModelConfig, *, width: int, quantization: str) -> int:
    """Of the whole model as engines get it, unpadded and undivided, a tied embedding once.

    quantization: --rollout-quantization.
    """
    scheme, whole = scheme_of(quantization), dataclasses.replace(model, make_vocab_size_divisible_by=1)
    parameters = stage_parameters(whole, ParallelConfig(), 0)
    return round(sum(p.numel * element_bytes(p, width=width, scheme=scheme) for p in parameters))
