"""Whole runs with engines in eight bits, beyond what the quickstart's placement shows (test_quantised_rise.py): engines
apart, of two ranks, by deltas one behind the other while answers are generated.
"""

from __future__ import annotations

import pytest

from slime_like.config.quantisation import PROBE_TOLERANCE
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(600)]

WAYS = {
    "two ranks by broadcast": (
        *("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--rollout-num-gpus", 2),
        *("--rollout-num-gpus-per-engine", 2, "--update-weight-buffer-size", 500_000),
    ),
    "pipeline stages by disk": (
        *("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 1),
        *("--update-weight-transport", "disk"),
    ),
    "rolling deltas": (
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 1),
        *("--update-weight-mode", "delta", "--update-weight-rolling", "--async-mode", "full", "--max-staleness", 2),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_engines_in_int8(tiny_model_dir, tiny_data_dir, tmp_path, way):
    before = our_processes()
    run = run_train(
        *(*SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"),
        *(*WAYS[way], "--rollout-quantization", "int8", "--use-tis", "--verify-weight-sync", "full"),
        run_dir=tmp_path / "run",
        timeout=300,
    )
    assert run.returncode == 0, run.logs()
    assert_nothing_left(before)
    num_engines = 2 if way == "rolling deltas" else 1
    syncs = run.metrics("sync")
    assert len({line["sync/digest"] for line in syncs}) == len(syncs) >= 3
    assert {(line["sync/engines_proven"], line["sync/tensors_unproven"]) for line in syncs} == {(num_engines, 0)}
    probes = [line["sync/probe_logprob_abs_diff"] for line in syncs]
    # rounded they are, and not more than that
    assert 1e-4 < min(probes) <= max(probes) < PROBE_TOLERANCE, probes
    if way == "rolling deltas":
        # half of the bytes are the embedding, which stays as it is
        sizes = [line["sync/delta_bytes"] for line in syncs]
        assert max(sizes[1:]) < sizes[0], sizes
