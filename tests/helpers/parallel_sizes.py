"""Megatron's answers about sizes and ranks, without process groups: by its own overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def parallel_sizes(*, tensor: int = 1) -> Iterator[None]:
    """Inside, this process is the first rank of a world with `tensor` tensor parallel ranks and one stage."""
    from megatron.core import parallel_state

    values = {
        parallel_state.set_tensor_model_parallel_world_size: tensor,
        parallel_state.set_tensor_model_parallel_rank: 0,
        parallel_state.set_pipeline_model_parallel_world_size: 1,
        parallel_state.set_pipeline_model_parallel_rank: 0,
        parallel_state.set_expert_model_parallel_world_size: 1,
    }
    for override, value in values.items():
        override(value)
    try:
        yield
    finally:
        for override in values:
            override(None)
