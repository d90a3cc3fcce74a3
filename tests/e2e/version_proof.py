"""What a run trained on, token by token against HF transformers with the weights that the engine names for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.hf_oracle import differences_by_version
from tests.e2e.runs import Finished


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


def proven(finished: Finished, first: Path, prefix: str, num_rollouts: int) -> Proven:
    """Version v is the weights after v - 1 rollouts, which --save-hf PREFIXhf/N has written; samples are in
    PREFIXsamples/N.npz.
    """
    models = {1: first} | {done + 1: Path(f"{prefix}hf/{done}") for done in range(1, num_rollouts + 1)}
    result = Proven(finished.returncode, finished.output, finished.run_dir, [], [], [], [])
    prompts = []
    for step in range(num_rollouts):
        groups = load_rollout(f"{prefix}samples/{step}.npz", step)
        prompts += [group.prompt.index for group in groups]
        trained = [step + 1 - sample.weight_versions[sample.loss_mask != 0] for g in groups for sample in g.samples]
        assert finished.metrics("rollout")[step]["async/staleness_max"] == np.concatenate(trained).max(initial=0)
        for group in groups:
            for sample in group.samples:
                versions = sample.weight_versions[sample.weight_versions >= 0]
                assert (np.diff(versions) >= 0).all(), "an answer goes on with newer weights, never with older ones"
                result.spreads.append(int(np.ptp(versions)))
                result.ages += (step + 1 - versions).tolist()
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
