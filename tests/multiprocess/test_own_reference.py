"""A reference that is still the policy is not asked: the same metrics to the last bit, from fewer passes."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of, run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.long_run]

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Flags of a policy; in each of two rollouts, of how many train steps the reference need not be asked."""

    saves: tuple[int, int]
    num_steps: int = 1
    groups: dict = dataclasses.field(default_factory=dict)


CASES = {
    "KL loss": Case((1, 0), groups={"loss": KL}),
    "KL loss, 2 steps": Case((2, 0), num_steps=2, groups={"loss": KL}),
    "KL loss, first step scored": Case((1, 0), groups={"loss": KL | {"score_first_step": True}}),
    "KL in the reward": Case((1, 0), groups={"loss": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}}),
    "a reference that follows": Case((1, 1), groups={"loss": KL | {"ref_update_interval": 1}}),
    # Without scores of its own samples beforehand: the pass of the second step has other weights.
    "engine's log-probs, 2 steps": Case((1, 0), num_steps=2, groups={"loss": KL | {"use_rollout_logprobs": True}}),
    "adapters, first step scored, a reference that follows": Case(
        (0, 1), groups={"loss": KL | {"score_first_step": True, "ref_update_interval": 1}, "lora": {"lora_rank": 4}}
    ),
    "adapters with dropout, a reference that follows": Case(
        (0, 0), groups={"loss": KL | {"ref_update_interval": 1}, "lora": {"lora_rank": 4, "lora_dropout": 0.5}}
    ),
}  # fmt: skip


def two_rollouts(place, case: Case, folder: str, port: int, changed: bool) -> list[tuple[dict, int, list[int]]]:
    """(metrics, micro-batches passed forward, those of each train step) of each. changed: nobody knows that the
    reference is the policy.
    """
    from slime_like.megatron_backend.rl_recipe import split_rollout
    from slime_like.megatron_backend.worker import TrainWorker

    config = make_config(
        folder, num_steps=case.num_steps, checkpoint={"ref_load": folder}, batch=DYNAMIC, **case.groups
    )
    worker = TrainWorker(config, **place | {"world_size": 1, "master_port": port})
    worker.start()
    passes = []
    worker.stage[0].register_forward_hook(lambda *_: passes.append(1))
    outcomes = []
    for step in range(2):
        if changed:
            worker._held.base_changes()
        before, samples = len(passes), make_samples(8, seed=step)
        report = recipe_of(worker).train(step, samples)
        packs = [len(worker.prepare(part).packs) for part in split_rollout(samples, case.num_steps)]
        outcomes.append((dict(report.metrics), len(passes) - before, packs))
    worker.close()
    return outcomes


def in_world(place, folder: str, ports: list[int]) -> dict:
    return {
        (name, changed): two_rollouts(place, case, folder, ports.pop(), changed)
        for name, case in CASES.items()
        for changed in (False, True)
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = make_tiny_model(str(tmp_path_factory.mktemp("models") / "model"), "qwen3")
    (outcomes,) = run_ranks(in_world, 1, folder, free_ports(2 * len(CASES)), timeout_s=300)
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_the_same_to_the_last_bit_from_fewer_passes(outcomes, name):
    for saves, (ours, fewer, packs), (asked, passes, _) in zip(
        CASES[name].saves, outcomes[name, False], outcomes[name, True], strict=True
    ):
        assert ours == asked
        assert passes - fewer == sum(packs[:saves])
