"""What a run takes of a checkpoint, and which frozen models stand beside a policy; where it starts, test_folder.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.loss import LossConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint.folder import STATE_FILE
from slime_like.megatron_backend.checkpoint.start_weights import frozen_sources, parts_to_continue, start_source
from slime_like.records import REFERENCE, TEACHER

EVERYTHING = {"optimizer": True, "schedule": True, "rng": True}


def saved(folder: Path, **state) -> str:
    """A folder with one empty checkpoint."""
    checkpoint = folder / "iter_0000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text(json.dumps({"num_rollouts_done": 2, "files": {}, **state}))
    return str(folder)


def test_a_checkpoint_is_continued_as_the_flags_say(tmp_path: Path):
    folder = saved(tmp_path / "saves")

    def parts(**options):
        return parts_to_continue(RunConfig(checkpoint=CheckpointConfig(load=folder, **options)))

    assert parts() == EVERYTHING
    assert parts(no_load_optim=True) == EVERYTHING | {"optimizer": False}
    assert parts(no_load_rng=True) == EVERYTHING | {"rng": False}
    assert parts(finetune=True) == dict.fromkeys(EVERYTHING, False)


def test_weights_alone_are_not_continued(tmp_path: Path):
    converted, other = saved(tmp_path / "converted", weights_only=True), saved(tmp_path / "other")
    assert parts_to_continue(RunConfig(checkpoint=CheckpointConfig(load=converted))) is None
    assert parts_to_continue(RunConfig(checkpoint=CheckpointConfig(ref_load=other))) is None
    (tmp_path / "hf").mkdir()
    assert parts_to_continue(RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path / "hf")))) is None


def test_adapters_and_whole_weights_are_not_taken_for_each_other(tmp_path: Path):
    modules = {"rank": 4, "scale": 1.0, "modules": []}
    adapters, whole = saved(tmp_path / "adapters", lora=modules), saved(tmp_path / "whole")

    def run(folder: str, *, rank: int, finetune: bool = False) -> RunConfig:
        options = CheckpointConfig(hf_checkpoint="/base", load=folder, finetune=finetune)
        return RunConfig(checkpoint=options, lora=LoraConfig(lora_rank=rank))

    assert start_source(run(adapters, rank=4).checkpoint) == "/base"  # whose weights are not in it
    assert start_source(run(whole, rank=4).checkpoint) == whole
    assert parts_to_continue(run(adapters, rank=4)) == EVERYTHING
    assert parts_to_continue(run(whole, rank=4, finetune=True)) == dict.fromkeys(EVERYTHING, False)
    with pytest.raises(CheckpointError, match="trained without --lora-rank.*--finetune"):
        parts_to_continue(run(whole, rank=4))
    with pytest.raises(CheckpointError, match="holds adapters of rank 4, not a model. Fix: --lora-rank 4"):
        parts_to_continue(run(adapters, rank=0))


def test_beside_adapters_the_base_is_the_reference():
    config = RunConfig(
        checkpoint=CheckpointConfig(hf_checkpoint="/base"),
        loss=LossConfig(use_kl_loss=True),
        lora=LoraConfig(lora_rank=4),
    )
    assert frozen_sources(config) == [(REFERENCE, "/base", None)]
    assert frozen_sources(dataclasses.replace(config, lora=LoraConfig())) == []
    needed = "--use-kl-loss needs --ref-load, the reference model."
    assert needed not in config.problems()
    apart = dataclasses.replace(config, placement=PlacementConfig(colocate_policy_ref=False))
    assert needed in apart.problems() and needed in dataclasses.replace(config, lora=LoraConfig()).problems()


def test_frozen_models_stand_beside_the_policy_only(tmp_path: Path):
    reference = saved(tmp_path / "reference")
    config = RunConfig(
        checkpoint=CheckpointConfig(ref_load=reference, ref_ckpt_step=2),
        loss=LossConfig(use_kl_loss=True, use_opd=True, opd_teacher_load="/teacher"),
        placement=PlacementConfig(colocate_policy_ref=True),
    )
    assert frozen_sources(config) == [(REFERENCE, reference, 2), (TEACHER, "/teacher", None)]
    assert frozen_sources(dataclasses.replace(config, loss=LossConfig())) == []
    for role in ("critic", "ref"):
        assert frozen_sources(dataclasses.replace(config, role=role)) == []
