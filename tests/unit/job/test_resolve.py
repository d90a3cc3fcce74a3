"""What a run needs is filled in and checked before anything starts."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import ConfigError, DataError
from slime_like.job.resolve import resolve
from slime_like.megatron_backend.checkpoint.folder import Draft
from slime_like.planning.placement import make_plan

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"


def config(tmp_path: Path, **groups) -> RunConfig:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"sort {n}", "label": "1"}) + "\n" for n in range(9)))
    base = RunConfig(
        model=ModelConfig(
            num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=320, max_position_embeddings=64
        ),
        checkpoint=CheckpointConfig(hf_checkpoint=str(TINY)),
        data=DataConfig(prompt_data=str(path), input_key="prompt", label_key="label", num_epoch=2),
        rollout=RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=2),
        reward=RewardConfig(rm_type="exact"),
        observability=ObservabilityConfig(run_dir=str(tmp_path / "run")),
        placement=PlacementConfig(actor_num_gpus_per_node=1, rollout_num_gpus=1),
    )
    return dataclasses.replace(base, **groups)


def test_everything_is_filled_in(tmp_path):
    wanted = config(tmp_path, sync=SyncConfig(update_weight_transport="disk"))
    resolved = resolve(wanted, make_plan(wanted))
    # 18 prompts, 4 a rollout
    assert resolved.num_rollout == resolved.config.data.num_rollout == 4 and resolved.config.data.num_epoch is None
    assert resolved.config.sync.update_weight_transport == "disk"
    assert resolved.config.sync.update_weight_disk_dir == str(tmp_path / "run" / "weights")
    assert (
        resolved.config.observability.run_dir == resolved.run.path == str(tmp_path / "run")
        and len(resolved.data.rows) == 9
    )
    assert None not in [getattr(resolved, field.name) for field in dataclasses.fields(resolved)]


def test_recorded_rollouts_replace_the_data(tmp_path):
    wanted = config(
        tmp_path,
        data=DataConfig(num_rollout=3),
        placement=PlacementConfig(actor_num_gpus_per_node=1, debug_train_only=True),
        observability=ObservabilityConfig(run_dir=str(tmp_path / "run"), load_debug_rollout_data="x-{rollout_id}.npz"),
    )
    resolved = resolve(wanted, make_plan(wanted))
    assert (resolved.num_rollout, resolved.data.rows) == (3, [])
    with pytest.raises(ConfigError, match="--load-debug-rollout-data needs --num-rollout"):
        resolve(dataclasses.replace(wanted, data=DataConfig(num_epoch=1)), make_plan(wanted))


def test_a_mistake_leaves_no_run_directory(tmp_path):
    right = config(tmp_path)
    wrong = dataclasses.replace(right, data=dataclasses.replace(right.data, label_key="gold"))
    with pytest.raises(DataError, match="--label-key"):
        resolve(wrong, make_plan(right))
    assert not (tmp_path / "run").exists()


def test_a_resume_says_which_flags_changed(tmp_path):
    """Of the command line: what is filled in at each start is none."""
    save = tmp_path / "run" / "checkpoints"
    going_on = config(tmp_path, checkpoint=CheckpointConfig(hf_checkpoint=str(TINY), resume="auto", save=str(save)))
    first = resolve(going_on, make_plan(going_on))
    assert first.notes == ()
    first.run.config.write_text(first.config.to_json())  # as train.py does
    draft = Draft(folder=str(save), number=1, record={})
    draft.make()
    draft.publish()
    os.unlink(tmp_path / "run" / ".lock")  # that process has ended
    (same,) = resolve(going_on, make_plan(going_on)).notes
    assert same == "--resume auto: going on after 1 rollouts"
    os.unlink(tmp_path / "run" / ".lock")
    other = dataclasses.replace(going_on, placement=PlacementConfig(actor_num_gpus_per_node=1, colocate=True))
    changed, _ = resolve(other, make_plan(other)).notes
    assert "changed since the last start" in changed and "--colocate False -> True" in changed
