"""A model on many ranks -> one HF folder that transformers and SGLang load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state

from slime_like.megatron_backend.checkpoint.folder import swap_in
from slime_like.megatron_backend.hf import names_and_shards as hf_convert
from slime_like.megatron_backend.hf.files import finish_folder, save_stage


def save_hf_folder(
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], folder: str, *, template: str, dtype: torch.dtype
) -> None:
    """Write weights in `dtype`, and config and tokenizer files of `template`. Collective.

    Replaces the folder if it exists, once it is whole.
    weights: starts this rank's part of hf_convert.export_hf(). The first rank of each pipeline stage writes that
    stage's tensors, at most hf_files.SHARD_BYTES of them in memory.
    """
    draft, rank = folder.rstrip("/") + ".tmp", torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        os.makedirs(draft)
    torch.distributed.barrier()
    file_of: dict[str, str] = {}
    num_bytes = 0
    if hf_convert.is_export_source():
        file_of, num_bytes = save_stage(
            weights(), draft, f"model-stage{parallel_state.get_pipeline_model_parallel_rank():02d}"
        )
    elif hf_convert.joins_export():
        for _ in weights():
            pass
    parts: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (file_of, num_bytes))
    if rank == 0:
        merged = {name: file for part, _ in parts for name, file in part.items()}
        finish_folder(draft, template=template, file_of=merged, total_bytes=sum(n for _, n in parts), dtype=dtype)
        swap_in(draft, folder.rstrip("/"))
    torch.distributed.barrier()
