"""What is impossible about batches, the optimizer and checkpoints, and which files are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.optimizer import OptimizerConfig

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100}


def test_the_defaults_are_possible():
    assert BatchConfig().problems() == OptimizerConfig().problems() == CheckpointConfig().problems() == []
    assert BatchConfig(**DYNAMIC).problems() == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BatchConfig(use_dynamic_batch_size=True), "--use-dynamic-batch-size needs --max-tokens-per-gpu."),
        (BatchConfig(max_tokens_per_gpu=100), "--max-tokens-per-gpu does nothing without --use-dynamic-batch-size."),
        (BatchConfig(log_probs_chunk_size=0), "--log-probs-chunk-size 0: must be at least 1, or -1"),
        (BatchConfig(qkv_format="bshd", **DYNAMIC), "--qkv-format bshd pads them"),
        (BatchConfig(micro_batch_size=0), "--micro-batch-size 0: must be at least 1."),
        (BatchConfig(global_batch_size=-1), "--global-batch-size -1: must be at least 1."),
        (OptimizerConfig(lr=1e-6, min_lr=1e-5), "need 0 <= min-lr <= lr"),
        (OptimizerConfig(lr=1e-6, min_lr=1e-7, critic_lr=1e-8), "need min-lr <= critic-lr"),
        (OptimizerConfig(lr_warmup_fraction=1.0), "must be in [0, 1)"),
        (OptimizerConfig(lr_warmup_fraction=0.1, lr_warmup_iters=2), "exclude each other"),
        (OptimizerConfig(lr_warmup_iters=5, lr_decay_iters=5), "does not end before --lr-decay-iters 5"),
        (OptimizerConfig(adam_beta2=1.0), "--adam-beta2 1.0: must be in [0, 1)."),
        (OptimizerConfig(overlap_cpu_optimizer_d2h_h2d=True), "does nothing without --optimizer-cpu-offload"),
        (CheckpointConfig(save_interval=2), "need --save"),
        (CheckpointConfig(save="s", save_interval=0), "--save-interval 0: must be at least 1."),
        (CheckpointConfig(async_save=True), "--async-save does nothing without --save."),
        (CheckpointConfig(save_total_limit=2), "--save-total-limit does nothing without --save."),
        (CheckpointConfig(resume="auto", load="l", ckpt_step=3), "both say where to go on"),
        (CheckpointConfig(ckpt_step=3), "--ckpt-step does nothing without --load."),
        (CheckpointConfig(load="l", ckpt_step=-3), "--ckpt-step -3: must not be negative."),
        (
            CheckpointConfig(save="s", save_interval=4, save_retain_interval=6),
            "--save-retain-interval 6: must be a multiple of --save-interval 4.",
        ),
    ],
)
def test_what_is_impossible_is_told(config, message: str):
    assert any(message in problem for problem in config.problems()), config.problems()


def test_missing_files(tmp_path: Path):
    assert CheckpointConfig().missing_files() == [
        "--hf-checkpoint is missing: the folder with config.json and the tokenizer."
    ]
    config = CheckpointConfig(hf_checkpoint=str(tmp_path), ref_load=f"{tmp_path}/no")
    assert config.missing_files() == [
        f"--hf-checkpoint {tmp_path}: has no config.json.",
        f"--ref-load {tmp_path}/no: no such folder.",
    ]
    (tmp_path / "config.json").write_text("{}")
    assert CheckpointConfig(hf_checkpoint=str(tmp_path), ref_load=str(tmp_path)).missing_files() == []
