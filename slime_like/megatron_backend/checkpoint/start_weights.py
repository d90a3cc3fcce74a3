"""Where a model's first weights come from, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.model import ModelConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint import state as checkpoint
from slime_like.megatron_backend.checkpoint.folder import TRACKER, find, is_megatron_folder, read_client_state
from slime_like.megatron_backend.hf.files import is_hf_folder
from slime_like.megatron_backend.hf.names_and_shards import load_hf
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.records import REFERENCE, TEACHER, WeightsRef


def start_source(options: CheckpointConfig) -> str:
    """The folder of the trainer's first weights: --load if it holds any, else --ref-load, else --hf-checkpoint."""
    if options.load and (is_megatron_folder(options.load) or is_hf_folder(options.load)):
        return options.load
    source = options.ref_load or options.hf_checkpoint
    assert source, "--hf-checkpoint is checked before workers are built"
    return source


def start_step(options: CheckpointConfig) -> int | None:
    """Which checkpoint of start_source() to take: --ckpt-step of --load, --ref-ckpt-step of --ref-load; None: the
    newest.

    Raises CheckpointError if --ckpt-step asks for one of a folder without any.
    """
    source = start_source(options)
    if options.ckpt_step is not None and (source != options.load or not is_megatron_folder(source)):
        raise CheckpointError(
            f"--ckpt-step {options.ckpt_step}: --load {options.load} holds no Megatron checkpoint. Fix: another --load,"
            " or drop --ckpt-step."
        )
    return options.ckpt_step if source == options.load else reference_step(options)


def reference_step(options: CheckpointConfig) -> int | None:
    """--ref-ckpt-step. Raises CheckpointError if --ref-load is a folder without checkpoints."""
    if options.ref_ckpt_step is not None and not is_megatron_folder(options.ref_load or ""):
        raise CheckpointError(
            f"--ref-ckpt-step {options.ref_ckpt_step}: --ref-load {options.ref_load} holds no Megatron checkpoint. Fix:"
            " drop it."
        )
    return options.ref_ckpt_step


def frozen_sources(config: RunConfig) -> list[tuple[WeightsRef, str, int | None]]:
    """The models that only score beside a policy, in its processes: name, folder and checkpoint (None: the newest)."""
    if config.role != "actor":
        return []
    options, loss = config.checkpoint, config.loss
    sources = (
        (REFERENCE, options.ref_load if config.swaps_reference else None, reference_step(options)),
        (TEACHER, loss.opd_teacher_load if loss.use_opd else None, loss.opd_teacher_ckpt_step),
    )
    return [(weights, folder, step) for weights, folder, step in sources if folder is not None]


def parts_to_continue(options: CheckpointConfig, source: str) -> dict[str, bool] | None:
    """What a run takes of the checkpoint in start_source() beside weights, by TrainWorker.load_state's names.

    None: there is nothing to continue from but weights, which are loaded already.
    """
    is_checkpoint = options.load is not None and source == options.load and is_megatron_folder(source)
    if not is_checkpoint or read_client_state(find(source, options.ckpt_step)).get("weights_only"):
        return None
    fresh = options.finetune
    return {
        "optimizer": not (options.no_load_optim or fresh),
        "schedule": not fresh,
        "rng": not (options.no_load_rng or fresh),
    }


def load_weights(
    model: Sequence[torch.nn.Module],
    model_config: ModelConfig,
    folder: str,
    *,
    step: int | None = None,
    value_head: bool = False,
) -> None:
    """Fill the model from an HF folder, or from the newest Megatron checkpoint in a folder or the one of `step`.

    value_head: the model is a critic; its head is filled from a critic's checkpoint only. Raises CheckpointError if the
    folder is neither.
    """
    if is_megatron_folder(folder):
        state = checkpoint.TrainState(model=model, model_config=model_config, with_rng=False, value_head=value_head)
        checkpoint.load(find(folder, step), state)
    elif is_hf_folder(folder):
        load_hf(unwrap(model), model_config, folder)
    else:
        raise CheckpointError(
            f"{folder} is neither an HF folder (no config.json) nor a Megatron checkpoint (no {TRACKER})."
        )
