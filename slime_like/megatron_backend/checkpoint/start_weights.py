"""Where a model's first weights come from, and how they are read."""

from __future__ import annotations

import dataclasses

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint import state as checkpoint
from slime_like.megatron_backend.checkpoint.folder import TRACKER, find, is_megatron_folder, read_client_state
from slime_like.megatron_backend.hf.files import is_hf_folder
from slime_like.megatron_backend.hf.names_and_shards import load_hf
from slime_like.megatron_backend.lora.state import check_record
from slime_like.megatron_backend.model.provider import unwrap
from slime_like.records import REFERENCE, TEACHER, WeightsRef


def start_source(options: CheckpointConfig) -> str:
    """The folder of the trainer's first weights: --load if it holds any, else --ref-load, else --hf-checkpoint.

    A checkpoint of adapters holds none: they are the base's.
    """
    if options.load and (is_megatron_folder(options.load) or is_hf_folder(options.load)):
        if not holds_adapters(options):
            return options.load
    source = options.ref_load or options.hf_checkpoint
    assert source, "--hf-checkpoint is checked before workers are built"
    return source


def holds_adapters(options: CheckpointConfig) -> bool:
    """Whether --load is a checkpoint of adapters, without their base."""
    if not options.load or not is_megatron_folder(options.load):
        return False
    return read_client_state(find(options.load, options.ckpt_step)).get("lora") is not None


def start_step(options: CheckpointConfig) -> int | None:
    """Which checkpoint of start_source() to take: --ckpt-step of --load, --ref-ckpt-step of --ref-load; None: the
    newest.

    Raises CheckpointError if --ckpt-step asks for one of a folder without any.
    """
    source = start_source(options)
    if holds_adapters(options):
        return reference_step(options)
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
    # beside adapters the base is the reference, unless another is asked for
    reference = options.ref_load or (start_source(options) if config.adapters else None)
    sources = (
        (REFERENCE, reference if config.swaps_reference else None, reference_step(options)),
        (TEACHER, loss.opd_teacher_load if loss.use_opd else None, loss.opd_teacher_ckpt_step),
    )
    return [(weights, folder, step) for weights, folder, step in sources if folder is not None]


def parts_to_continue(config: RunConfig) -> dict[str, bool] | None:
    """What a run takes of the checkpoint in --load beside weights, by TrainWorker.load_state's names.

    None: there is nothing to continue from but weights, which are loaded already. Raises CheckpointError if the
    checkpoint and the run differ in whether adapters are trained.
    """
    options = config.checkpoint
    if options.load is None or not is_megatron_folder(options.load):
        return None
    saved = read_client_state(find(options.load, options.ckpt_step))
    has_adapters, wants_adapters = saved.get("lora") is not None, config.adapters is not None
    if has_adapters and not wants_adapters:
        check_record(options.load, saved["lora"], None, config.model)
    if saved.get("weights_only"):
        return None
    fresh = options.finetune
    if wants_adapters and not has_adapters and not fresh:
        raise CheckpointError(
            f"--load {options.load} was trained without --lora-rank: its optimizer and counters are not of adapters."
            " Fix: --finetune, and its weights are the frozen base."
        )
    return {
        "optimizer": not (options.no_load_optim or fresh),
        "schedule": not fresh,
        "rng": not (options.no_load_rng or fresh),
    }


def load_weights(state: checkpoint.TrainState, folder: str, *, step: int | None = None, whole: bool = False) -> None:
    """Fill the model of `state` from an HF folder or a Megatron checkpoint: the newest, or that of `step`.

    A critic's head is filled from a critic's checkpoint only; of a model with adapters these, where the checkpoint is
    of adapters, else the base. whole: a model is wanted, so no checkpoint of adapters alone. Raises CheckpointError if
    the folder is none of what it may be.
    """
    if is_megatron_folder(folder):
        path = find(folder, step)
        lora = state.lora if read_client_state(path).get("lora") is not None and not whole else None
        checkpoint.load(path, dataclasses.replace(state, with_rng=False, lora=lora))
    elif is_hf_folder(folder):
        load_hf(unwrap(state.model), state.model_config, folder)
    else:
        raise CheckpointError(
            f"{folder} is neither an HF folder (no config.json) nor a Megatron checkpoint (no {TRACKER})."
        )
