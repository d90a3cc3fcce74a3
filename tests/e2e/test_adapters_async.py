"""Adapters alone travel while answers are generated: every trained token against HF transformers with the merged
weights of the version that its request named; and to engines that somebody else started.
"""

# Covers slime_like.config.adapter_rules too.

from __future__ import annotations

import pytest

from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, environment, our_processes, run_train
from tests.e2e.version_proof import Proven, proven

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

APART = ["--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1]
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
ADAPTERS = ["--lora-rank", 4, "--lora-alpha", 16, "--lora-target-modules", *TARGETS, "--lr", "1e-2"]
ADAPTERS += ["--update-weight-mode", "adapter"]


@pytest.fixture
def train(tiny_model_dir, tiny_data_dir, tmp_path):
    """Run train.py, with the merged weights of every version kept, and look at what it trained on."""

    def run(*flags, tokens: int, num_rollouts: int) -> Proven:
        before = our_processes()
        finished = run_train(
            *SMALL_RUN,
            *("--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl", *ADAPTERS),
            *("--num-rollout", num_rollouts, "--rollout-max-response-len", tokens, "--max-tokens-per-gpu", 1024),
            *("--save", tmp_path / "save", "--save-interval", 1, "--save-hf", tmp_path / "hf/{rollout_id}"),
            *("--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz", *flags),
            run_dir=tmp_path / "run",
        )
        assert finished.returncode == 0, finished.logs()
        assert_nothing_left(before)
        assert {line["sync/transport"] for line in finished.metrics("sync")} == {
            "http" if "http" in flags else "adapter"
        }
        return proven(finished, tiny_model_dir, f"{tmp_path}/", num_rollouts)

    return run


def test_an_answer_keeps_the_version_that_it_named(train):
    run = train(*APART, "--async-mode", "full", "--max-staleness", 2, tokens=100, num_rollouts=6)
    assert run.worst(later=False) < 1e-4
    assert set(run.spreads) == {0}, "no answer goes on with other weights"
    assert 1 <= max(run.ages) <= 2, "syncs met running answers"
    log = (run.run_dir / "logs/engine-0.log").read_text()
    assert "pause" not in log.lower(), "nothing was paused"
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) > 1e-3  # tokens of older adapters


def test_by_http_no_folder_is_needed_and_engines_compare_digests(train):
    """From two pipeline stages, to an engine on two ranks."""
    run = train(
        *("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 2),
        *("--rollout-num-gpus-per-engine", 2, "--async-mode", "one-step", "--update-weight-transport", "http"),
        tokens=24,
        num_rollouts=3,
    )
    assert run.worst(later=False) < 1e-4
    sync = run.metrics("sync")
    assert [line["sync/engines_proven"] for line in sync] == [1] * 4
    assert ["sync/probe_logprob_abs_diff" in line for line in sync] == [True, False, False, False]
    assert not (run.run_dir / "weights").exists()


def test_one_step_off(train):
    run = train(*APART, "--async-mode", "one-step", tokens=24, num_rollouts=3)
    assert run.worst(later=False) < 1e-4 and set(run.spreads) == {0}
    assert sorted(set(run.ages)) == [0, 1]


def test_partial_rollouts_on_the_trainers_own_cards(train):
    """What is gone on with names the newer version; engines give back their KV cache only, the base stays."""
    run = train(
        *("--actor-num-gpus-per-node", 1, "--colocate", "--partial-rollout", "--over-sampling-batch-size", 8),
        *("--rollout-stop-token-ids", *range(10, 22)),  # answers of many lengths
        tokens=100,
        num_rollouts=4,
    )
    assert run.worst(later=False) < 1e-4 and run.worst(later=True) < 1e-4
    assert max(run.spreads) >= 1 and sum(line["async/continued_requests"] for line in run.metrics("rollout")) > 0


def test_engines_of_somebody_else(tiny_model_dir, tiny_data_dir, tmp_path):
    """One that was started for adapters serves them, also those of another run before; one that was not is refused."""
    before = our_processes()
    base = [
        *SMALL_RUN, *ADAPTERS, "--hf-checkpoint", tiny_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node", 1, "--rollout-external", "--rollout-external-engine-addrs",
    ]  # fmt: skip
    lora = {"enable_lora": True, "max_lora_rank": "8", "lora_target_modules": TARGETS}
    spec = EngineSpec(
        index=0, model_path=str(tiny_model_dir), dtype="float32", log_path=f"{tmp_path}/engine.log", extra_flags=lora
    )
    with_adapters = launch_engine(spec, 120)
    env = environment(SLIME_LIKE_ENGINE_API_KEY=with_adapters.endpoint.api_key or "")
    try:
        for number in range(2):
            run = run_train(
                *base, with_adapters.endpoint.url, "--num-rollout", 2, run_dir=tmp_path / f"run{number}", env=env
            )
            assert run.returncode == 0, run.logs()
            assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4
            assert all(line["sync/probe_logprob_abs_diff"] <= 1e-4 for line in run.metrics("sync"))
        flags = [*base, with_adapters.endpoint.url, "--lora-rank", 16]
        refused = run_train(*flags, run_dir=tmp_path / "refused", env=env)
        assert refused.returncode == 2 and "takes adapters of rank 8 at most" in refused.output, refused.logs()
    finally:
        with_adapters.close()
    assert_nothing_left(before)
