"""Generating while training on the real stack, and every trained token against HF transformers with the weights that
the engine names for it.
"""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train
from tests.e2e.version_proof import Proven, proven

pytestmark = pytest.mark.e2e

NUM_ROLLOUTS = 6
APART = ["--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1]


@pytest.fixture
def train(tiny_model_dir, tiny_data_dir, tmp_path):
    """Run train.py, with the weights of every version kept, and look at what it trained on."""

    def run(*flags, tokens: int = 100, num_rollouts: int = NUM_ROLLOUTS) -> Proven:
        before = our_processes()
        finished = run_train(
            *SMALL_RUN,
            *("--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"),
            *("--num-rollout", num_rollouts, "--rollout-max-response-len", tokens, "--max-tokens-per-gpu", 1024),
            *("--save", tmp_path / "save", "--save-interval", 1, "--save-hf", tmp_path / "hf/{rollout_id}"),
            *("--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz", *flags),
            run_dir=tmp_path / "run",
        )
        assert finished.returncode == 0, finished.logs()
        assert_nothing_left(before)
        return proven(finished, tiny_model_dir, f"{tmp_path}/", num_rollouts)

    return run


def test_one_step_off(train, tiny_data_dir):
    evaluation = [
        "--eval-interval",
        1,
        "--eval-async",
        "--eval-prompt-data",
        "few",
        f"{tiny_data_dir}/eval.jsonl@[0:4]",
    ]
    run = train(*APART, *evaluation, "--async-mode", "one-step", tokens=24, num_rollouts=3)
    assert [line["step"] for line in run.metrics("eval")] == [0, 1, 2, 3]
    assert run.worst(later=False) < 1e-4 and set(run.spreads) == {0}
    assert sorted(set(run.ages)) == [0, 1]  # the first rollout is its weights' own
    config = (run.run_dir / "config.json").read_text()
    assert '"use_tis": true' in config


@pytest.mark.long_run
def test_weights_change_in_one_engine_after_the_other(train):
    """Every token is of the version that its own engine names, while two serve different ones."""
    run = train(
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 2, "--update-weight-transport", "disk"),
        *("--update-weight-rolling", "--async-mode", "full", "--max-staleness", 2),
    )
    assert run.worst(later=False) < 1e-4 and run.worst(later=True) < 1e-4
    assert max(run.spreads) >= 1 and max(run.ages) <= 2
    assert all(line["sync/engines_proven"] == 2 for line in run.metrics("sync"))


@pytest.mark.long_run
@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("way", [("broadcast",), ("disk",), ("delta",)], ids=lambda way: way[0])
def test_weights_change_under_running_answers(train, mode: str, way: tuple[str]):
    if way != ("broadcast",) and mode != "retract":
        pytest.skip("how requests meet a sync has nothing to do with how weights travel")
    travel = ["--update-weight-mode", "delta"] if way == ("delta",) else ["--update-weight-transport", *way]
    # in_place forgets no prefix that the old weights computed: new requests must not meet one.
    more = ["--sglang-disable-radix-cache"] if mode == "in_place" else []
    run = train(
        *APART, *travel, *more, "--async-mode", "full", "--max-staleness", 2, "--update-weight-pause-mode", mode
    )
    assert run.worst(later=False) < 1e-4
    assert max(run.spreads) >= 1, "no sync met a running answer"
    assert max(run.ages) <= 2
    if mode == "in_place":
        assert run.worst(later=True) > 1e-4  # the stale cache, which the correction bears
    else:
        assert run.worst(later=True) < 1e-4
    lines = run.metrics("rollout")
    assert all(line["async/dropped_groups"] == line["async/requeued_groups"] == 0 for line in lines)
    if mode == "abort":
        assert sum(line["async/continued_requests"] for line in lines) > 0


@pytest.mark.long_run
def test_partial_rollouts_on_the_trainers_own_cards(train):
    run = train(
        *("--actor-num-gpus-per-node", 1, "--colocate", "--partial-rollout", "--over-sampling-batch-size", 8),
        *("--mask-offpolicy-in-partial-rollout", "--rollout-stop-token-ids", *range(10, 22)),  # answers of many lengths
    )
    assert run.worst(later=False) < 1e-4 and run.worst(later=True) < 1e-4
    lines = run.metrics("rollout")
    assert sum(line["async/continued_requests"] for line in lines) > 0 and max(run.spreads) >= 1
    assert all(line["async/staleness_max"] == 0 for line in lines), "older tokens are masked"
