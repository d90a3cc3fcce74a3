"""A run that trains adapters: SGLang generates with the merged weights, checkpoints are PEFT folders, and it goes on
under another layout.
"""

# Covers slime_like.sglang_backend.adapter_client too.

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train
from tests.helpers.peft_truth import load_peft

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
ADAPTERS = ["--lora-rank", "4", "--lora-alpha", "16", "--lora-target-modules", *TARGETS]
KL = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "low_var_kl"]  # against the base: no --ref-load


def test_adapters_are_trained_served_saved_and_resumed(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    flags = [
        *SMALL_RUN, *ADAPTERS, *KL, "--lr", "1e-2", "--hf-checkpoint", tiny_model_dir,
        "--prompt-data", f"{tiny_data_dir}/train.jsonl", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1,
        "--save", tmp_path / "save", "--save-interval", 1, "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
    ]  # fmt: skip
    split = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    kept = ["--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz"]
    run = run_train(*flags, *split, *kept, run_dir=tmp_path / "run")
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1, 2]
    assert 0 < train[0]["train/kl_loss"] < train[2]["train/kl_loss"]  # it starts at the base
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert [line["sync/version"] for line in sync] == [1, 2, 3, 4]
    assert len({line["sync/digest"] for line in sync}) == 4
    assert sync[0]["sync/probe_logprob_abs_diff"] <= 1e-4
    assert largest_difference(tmp_path / "hf/2", tmp_path / "samples/2.npz") <= 1e-4
    assert largest_difference(tiny_model_dir, tmp_path / "samples/2.npz") > 1e-2
    # A checkpoint is a PEFT folder, and holds nothing of the base.
    folder = tmp_path / "save/iter_0000003"
    merged = load_peft(str(tiny_model_dir), str(folder)).merge_and_unload().state_dict()
    base = load_file(f"{tiny_model_dir}/model.safetensors")
    for name, tensor in hf_tensors(tmp_path / "hf/3").items():
        np.testing.assert_allclose(tensor, merged[name].numpy(), atol=1e-6, rtol=0, err_msg=name)
        assert (tensor != base[name]).any() == any(target in name for target in TARGETS)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < 0.5 * sum(tensor.nbytes for tensor in base.values())
    # Two data parallel ranks go on from there.
    resumed = run_train(*flags, "--load", tmp_path / "save", "--num-rollout", 4, run_dir=tmp_path / "resumed")
    assert resumed.returncode == 0, resumed.logs()
    assert [line["step"] for line in resumed.metrics("train")] == [3]
    assert [line["sync/version"] for line in resumed.metrics("sync")][-1] == 5
    assert resumed.metrics("train")[0]["train/logprob_abs_diff_max"] <= 1e-4
    assert_nothing_left(before)


def test_adapters_alone_travel_and_requests_name_their_version(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    run = run_train(
        *SMALL_RUN, *ADAPTERS, "--lr", "1e-2", "--hf-checkpoint", tiny_model_dir, "--update-weight-mode", "adapter",
        "--prompt-data", f"{tiny_data_dir}/train.jsonl", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1,
        "--tensor-model-parallel-size", 2, "--save", tmp_path / "save", "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
        "--save-interval", 1, "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz",
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert [line["sync/version"] for line in sync] == [1, 2, 3, 4]
    assert len({line["sync/digest"] for line in sync}) == 4
    assert {line["sync/transport"] for line in sync} == {"adapter"}
    assert all(line["sync/probe_logprob_abs_diff"] <= 1e-4 for line in sync)
    adapters = load_file(tmp_path / "save/iter_0000003/adapter_model.safetensors")
    assert {line["sync/bytes"] for line in sync} == {sum(tensor.nbytes for tensor in adapters.values())}
    assert largest_difference(tmp_path / "hf/2", tmp_path / "samples/2.npz") <= 1e-4
    assert largest_difference(tiny_model_dir, tmp_path / "samples/2.npz") > 1e-2
    assert_nothing_left(before)


def hf_tensors(folder) -> dict[str, np.ndarray]:
    """Of all files of an HF folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
