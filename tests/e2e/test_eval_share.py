"""An evaluation that has an engine of its own (--eval-num-engines), on the real stack: syncs go on beside it, and it is
of one version all the same.
"""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

NUM_ROLLOUTS, INTERVAL = 6, 3
#: How weights travel -> flags.
WAYS = {
    "broadcast": [],
    "disk": ["--update-weight-transport", "disk"],
    "delta": ["--update-weight-mode", "delta"],
}


@pytest.mark.parametrize(("mode", "way"), [("full", "broadcast"), ("one-step", "disk"), ("off", "delta")])
def test_syncs_go_on_beside_an_evaluation_on_an_engine_of_its_own(tiny_model_dir, tiny_data_dir, tmp_path, mode, way):
    before = our_processes()
    run = run_train(
        *SMALL_RUN,
        *("--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 2, *WAYS[way], "--num-rollout", NUM_ROLLOUTS),
        *("--async-mode", mode, "--eval-async", "--eval-num-engines", 1, "--eval-interval", INTERVAL),
        *("--eval-prompt-data", "few", f"{tiny_data_dir}/eval.jsonl@[0:8]", "--n-samples-per-eval-prompt", 8),
        *("--eval-max-response-len", 200, "--verify-weight-sync", "full"),
        *("--custom-eval-rollout-log-function-path", "tests.e2e.rewards.eval_versions"),
        run_dir=tmp_path / "run",
    )
    assert run.returncode == 0, run.logs()
    assert_nothing_left(before)
    assert "during an evaluation 1 of 2 engines keep its weights" in run.output
    evaluations, syncs = run.metrics("eval"), run.metrics("sync")
    print(mode, way, [(line["eval/seconds"], line["eval/waited_seconds"]) for line in evaluations])
    print([(line["sync/version"], line["sync/engines_proven"], line["sync/seconds"]) for line in syncs])
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    for line in evaluations:
        versions = {line[f"eval/{which}_version"] for which in ("weight", "oldest", "newest")}
        assert versions == {line["step"] + 1}, "every token is of the weights that it began with"
        assert line["eval/engines"] == 1
    proven = {line["sync/version"]: line["sync/engines_proven"] for line in syncs}
    assert proven[2] == 1 and syncs[1]["time"] < evaluations[0]["time"], "while it ran, the other engine got weights"
    assert [proven[version] for version in (1, 4, 7)] == [2, 2, 2], "each evaluation begins on weights that all hold"
    if way == "delta":
        assert [line["sync/full_engines"] for line in syncs] == [2, 0, 0, 0, 0, 0, 0], "one receiver serves both"
