"""Where a model's first weights come from, and how they are read."""

from __future__ import annotations

import torch

from slime_like.config.model import ModelConfig
from slime_like.config.training import CheckpointConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend import checkpoint
from slime_like.megatron_backend.hf_convert import load_hf
from slime_like.megatron_backend.hf_files import is_hf_folder
from slime_like.megatron_backend.model_provider import unwrap


def start_source(options: CheckpointConfig) -> str:
    """The folder of the trainer's first weights: --load if it holds any, else --ref-load, else --hf-checkpoint."""
    if options.load and (checkpoint.is_megatron_folder(options.load) or is_hf_folder(options.load)):
        return options.load
    source = options.ref_load or options.hf_checkpoint
    assert source, "--hf-checkpoint is checked before workers are built"
    return source


def load_weights(model: torch.nn.Module, model_config: ModelConfig, folder: str, *, value_head: bool = False) -> None:
    """Fill the model from an HF folder or the newest Megatron checkpoint in a folder. Raises CheckpointError if it is neither.

    value_head: the model is a critic; its head is filled from a critic's checkpoint only.
    """
    if checkpoint.is_megatron_folder(folder):
        state = checkpoint.TrainState(model=model, model_config=model_config, with_rng=False, value_head=value_head)
        checkpoint.load(checkpoint.latest(folder), state)
    elif is_hf_folder(folder):
        load_hf(unwrap(model), model_config, folder)
    else:
        raise CheckpointError(f"{folder} is neither an HF folder (no config.json) nor a Megatron checkpoint (no {checkpoint.TRACKER}).")
