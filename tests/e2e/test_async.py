"""Generating while training on the real stack, and every trained token against HF transformers with the weights that
the engine names for it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.hf_oracle import differences_by_version
from tests.e2e.runs import SMALL_RUN, Finished, assert_nothing_left, our_processes, run_train

pytestmark = pytest.mark.e2e

NUM_ROLLOUTS = 6
APART = ["--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1]


@dataclasses.dataclass
class Proven(Finished):
    """A run whose tokens were held against HF."""

    spreads: list[int]  # weight versions between first and last token of each sample
    ages: list[int]  # rollout steps between the weights of each token and those trained
    differences: list[float]  # of each token, the first version of its sample and later ones
    later: list[bool]  # whether a token is of a later version than its sample's first

    def worst(self, *, later: bool) -> float:
        """Largest |log-prob difference| of the first version's tokens, or of all after."""
        return max(
            (d for d, is_later in zip(self.differences, self.later, strict=True) if is_later == later), default=0
        )


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
        return proven(finished, tiny_model_dir, tmp_path, num_rollouts)

    return run


def proven(finished: Finished, first: Path, folder: Path, num_rollouts: int) -> Proven:
    """Version v is the weights after v - 1 rollouts, which --save-hf has written."""
    models = {1: first} | {done + 1: folder / f"hf/{done}" for done in range(1, num_rollouts + 1)}
    result = Proven(finished.returncode, finished.output, finished.run_dir, [], [], [], [])
    prompts = []
    for step in range(num_rollouts):
        groups = load_rollout(str(folder / f"samples/{step}.npz"), step)
        prompts += [group.prompt.index for group in groups]
        ages = len(result.ages)
        for group in groups:
            for sample in group.samples:
                versions = sample.weight_versions[sample.weight_versions >= 0]
                assert (np.diff(versions) >= 0).all(), "an answer goes on with newer weights, never with older ones"
                result.spreads.append(int(np.ptp(versions)))
                result.ages += (step + 1 - versions).tolist()
        assert finished.metrics("rollout")[step]["async/staleness_max"] == max(result.ages[ages:])
        for difference, is_later in differences_by_version(models, groups):
            result.differences.append(difference)
            result.later.append(is_later)
    assert len(set(prompts)) == len(prompts) == 4 * num_rollouts, "a prompt was trained on twice"
    syncs = finished.metrics("sync")
    assert [line["sync/version"] for line in syncs] == list(range(1, num_rollouts + 2))
    assert all(line["sync/digest"] for line in syncs)
    print(
        f"tokens {len(result.ages)}, mixed {sum(s > 0 for s in result.spreads)} of {len(result.spreads)} samples,"
        f" oldest {max(result.ages)}, worst {result.worst(later=False):.1e} / later {result.worst(later=True):.1e}"
    )
    return result


def test_one_step_off(train):
    run = train(*APART, "--async-mode", "one-step", tokens=24, num_rollouts=3)
    assert run.worst(later=False) < 1e-4 and set(run.spreads) == {0}
    assert sorted(set(run.ages)) == [0, 1]  # the first rollout is its weights' own
    config = (run.run_dir / "config.json").read_text()
    assert '"use_tis": true' in config


@pytest.mark.long_run
@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("way", [("broadcast",), ("disk",), ("delta",)], ids=lambda way: way[0])
def test_weights_change_under_running_answers(train, mode: str, way: tuple[str]):
    if way != ("broadcast",) and mode != "retract":
        pytest.skip("how requests meet a sync has nothing to do with how weights travel")
    travel = ["--update-weight-mode", "delta"] if way == ("delta",) else ["--update-weight-transport", *way]
    run = train(*APART, *travel, "--async-mode", "full", "--max-staleness", 2, "--update-weight-pause-mode", mode)
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
        *("--mask-offpolicy-in-partial-rollout",),
    )
    assert run.worst(later=False) < 1e-4 and run.worst(later=True) < 1e-4
    assert sum(line["async/continued_requests"] for line in run.metrics("rollout")) > 0
