"""A model on many ranks -> one HF folder that transformers and SGLang load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state

from slime_like.errors import SaveError
from slime_like.megatron_backend.checkpoint.agreement import agreed
from slime_like.megatron_backend.checkpoint.folder import swap_in
from slime_like.megatron_backend.hf import names_and_shards as hf_convert
from slime_like.megatron_backend.hf.files import finish_folder, save_stage


def save_hf_folder(
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]], folder: str, *, template: str, dtype: torch.dtype
) -> None:
    """Write weights in `dtype`, and config and tokenizer files of `template`. Collective.

    Replaces the folder if it exists, once it is whole.
    weights: starts this rank's part of hf_convert.export_hf(). The first rank of each pipeline stage writes that
    stage's tensors, at most hf_files.SHARD_BYTES of them in memory. Raises SaveError on every rank if one cannot
    write; nothing is left of it then.
    """
    draft, what = folder.rstrip("/") + ".tmp", f"the HF folder {folder}"

    def make() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        os.makedirs(draft)

    def finish() -> None:
        of_stages = [part for part in parts if part is not None]
        merged = {name: file for file_of, _ in of_stages for name, file in file_of.items()}
        total_bytes = sum(num_bytes for _, num_bytes in of_stages)
        finish_folder(draft, template=template, file_of=merged, total_bytes=total_bytes, dtype=dtype)
        swap_in(draft, folder.rstrip("/"))

    try:
        agreed(what, make)
        if hf_convert.joins_export() and not hf_convert.is_export_source():
            for _ in weights():
                pass
        parts = agreed(what, lambda: _save_stage(weights(), draft), writes=hf_convert.is_export_source())
        agreed(what, finish)
    except SaveError:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _save_stage(weights: Iterator[tuple[str, torch.Tensor]], folder: str) -> tuple[dict[str, str], int]:
    """As save_stage; after a failure the other ranks' part in the weights' collectives comes to its end."""
    try:
        return save_stage(weights, folder, f"model-stage{parallel_state.get_pipeline_model_parallel_rank():02d}")
    except BaseException:
        for _ in weights:
            pass
        raise
