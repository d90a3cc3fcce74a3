"""What must not change loss and gradients, and what must: the same batch in another order, cut, layout or padding.

Samples that teach nothing.
"""

import dataclasses
import gc

import numpy as np
import pytest

from slime_like.algorithms import group_advantages
from slime_like.config.loss import LossConfig
from slime_like.records import per_token
from tests.helpers.parity import DYNAMIC, Row, in_waves, ragged_batch, whole_gradients
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import add_gradients, advantage_of, free_ports, make_config, run_ranks

pytestmark = pytest.mark.multiprocess

MODELS = ["qwen3", "qwen3_moe"]
PER_TOKEN = {"calculate_per_token_loss": True}
SHUFFLED = [7, 2, 9, 0, 5, 1, 8, 3, 6, 4]


def with_untrained(samples, seed=0):
    """The batch and one sample whose mask is zero: `seed` chooses its tokens and advantage."""
    generator = np.random.default_rng(seed)
    one = samples[0]
    tokens = generator.integers(0, 101, len(one.tokens)).astype(np.int32)
    advantages = generator.normal(size=len(tokens)).astype(np.float32)
    return [
        *samples,
        dataclasses.replace(one, tokens=tokens, loss_mask=np.zeros_like(one.loss_mask), advantages=advantages),
    ]


def equally_rewarded(samples):
    """Advantages as the group normalisation gives them to equal rewards."""
    advantages = group_advantages.normalize(np.full(len(samples), 0.7), LossConfig())
    return [
        dataclasses.replace(sample, advantages=per_token(float(advantage), sample.loss_mask))
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def taught_by_metadata(samples):
    """Advantages moved to where only a user's loss finds them."""
    return [
        dataclasses.replace(
            sample, advantages=np.zeros_like(sample.advantages), metadata={"taught": advantage_of(sample)}
        )
        for sample in samples
    ]


def loss_from_metadata(args, batch, reduce):
    """A user's loss that takes its advantages from the samples' metadata.

    At ratio 1 it has the gradient of the built-in one.
    """
    taught = batch.log_probs.new_tensor([batch.metadata[place]["taught"] for place in batch.sample_of_token.tolist()])
    return -reduce((batch.log_probs - batch.log_probs.detach()).exp() * taught), {}


METADATA_LOSS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": f"{__name__}.loss_from_metadata",
    "entropy_coef": 0.0,
}
#: name -> (ranks, flags of the layout, flags of the batch, flags of the loss, what is done to the samples)
CASES = {
    "base": (1, {}, DYNAMIC, {}, list),
    "shuffled": (1, {}, DYNAMIC, {}, lambda samples: [samples[i] for i in SHUFFLED]),
    "one by one": (1, {}, {}, {}, list),
    "five at a time": (1, {}, {"micro_batch_size": 5}, {}, list),
    "all in one pack": (1, {}, DYNAMIC | {"max_tokens_per_gpu": 4000}, {}, list),
    "packs padded to 64": (1, {}, DYNAMIC | {"data_pad_size_multiplier": 64}, {}, list),
    "padded rows": (1, {}, {"qkv_format": "bshd", "micro_batch_size": 5}, {}, list),
    "padded rows of other lengths": (
        2,
        {},
        {"qkv_format": "bshd", "micro_batch_size": 2},
        {},
        lambda samples: [samples[i] for i in SHUFFLED],
    ),
    "dp2": (2, {}, DYNAMIC, {}, list),
    "dp2, shuffled": (2, {}, DYNAMIC, {}, lambda samples: [samples[i] for i in SHUFFLED]),
    "dp4": (4, {}, DYNAMIC, {}, list),
    "dp4, by flops": (
        4,
        {},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_by_flops": True},
        {},
        list,
    ),
    "every sample twice": (2, {}, DYNAMIC, {}, lambda samples: [*samples, *samples]),
    "per token": (1, {}, DYNAMIC, PER_TOKEN, list),
    "per token, dp4, one more without a mask": (4, {}, DYNAMIC, PER_TOKEN, with_untrained),
    "one more without a mask": (1, {}, DYNAMIC, {}, with_untrained),
    "another without a mask": (2, {}, DYNAMIC, {}, lambda samples: with_untrained(samples, seed=5)),
    "no entropy": (1, {}, DYNAMIC, {"entropy_coef": 0.0}, list),
    "taught by metadata": (2, {}, DYNAMIC, METADATA_LOSS, taught_by_metadata),
    "larger packs for scores": (2, {}, DYNAMIC | {"log_probs_max_tokens_per_gpu": 80}, {}, list),
    "equal rewards": (2, {}, DYNAMIC, {"entropy_coef": 0.0}, equally_rewarded),
}
SAME_AS_BASE = [
    name
    for name in CASES
    if name != "base"
    and "mask" not in name
    and name not in ("per token", "no entropy", "taught by metadata", "equal rewards")
]


def run_cases(place, folders, ports):
    """{(model, case): loss, gradients and packs} of the cases that this rank is the first of."""
    rows = [Row(model, name, CASES[name][0], {}) for model in MODELS for name in CASES]
    results = {}
    for wave in in_waves(rows):
        for number, first in wave:
            row = rows[number]
            if first <= place["rank"] < first + row.ranks:
                own = place | {"rank": place["rank"] - first, "world_size": row.ranks, "master_port": ports[number]}
                result = run_case(own, folders[row.model], CASES[row.layout])
                gc.collect()  # the trainer's process groups, whose threads would otherwise add up
                if own["rank"] == 0:
                    results[row.model, row.layout] = result
    return results


def run_case(place, folder, case):
    from slime_like.megatron_backend.worker import TrainWorker

    ranks, parallel, batch, loss, change = case
    config = make_config(
        folder, num_ranks=ranks, num_samples=10, parallel=parallel, batch=batch, loss={"entropy_coef": 0.02} | loss
    )
    worker = TrainWorker(config, **place)
    worker.start()
    metrics = add_gradients(worker, change(ragged_batch()))
    gradients = whole_gradients(worker)
    batch = worker.prepare(ragged_batch())
    cut = [[sum(pack.lengths) for pack in packs] for packs in (batch.packs, batch.scoring_packs or ())]
    worker.close()
    return {"cut": cut, "loss": metrics["train/loss"], "entropy": metrics["train/entropy"], "gradients": gradients}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {model: make_tiny_model(str(root / model), model, num_layers=2) for model in MODELS}
    by_rank = run_ranks(run_cases, 4, folders, free_ports(len(MODELS) * len(CASES)), timeout_s=240)
    return {key: result for of_rank in by_rank for key, result in of_rank.items()}


def assert_same(ours, theirs, *, factor=1.0, bound=5e-6):
    """Loss and every gradient, the latter against the largest of all."""
    assert ours["loss"] == pytest.approx(factor * theirs["loss"], rel=1e-5)
    assert set(ours["gradients"]) == set(theirs["gradients"])
    largest = max(np.abs(gradient).max() for gradient in theirs["gradients"].values())
    for name, gradient in theirs["gradients"].items():
        np.testing.assert_allclose(
            ours["gradients"][name], factor * gradient, atol=bound * largest, rtol=0, err_msg=name
        )


each_model = pytest.mark.parametrize("model", MODELS)


@each_model
@pytest.mark.parametrize("name", SAME_AS_BASE)
def test_the_same_batch_gives_the_same_loss_and_gradients(outcomes, model, name):
    assert_same(outcomes[model, name], outcomes[model, "base"])


@each_model
def test_gradients_are_compared_where_they_matter(outcomes, model):
    """Another mean gives other gradients, far outside the bound; so would a sample left out or counted twice."""
    base, other = outcomes[model, "base"], outcomes[model, "per token"]
    largest = max(np.abs(gradient).max() for gradient in base["gradients"].values())
    assert (
        max(np.abs(base["gradients"][name] - other["gradients"][name]).max() for name in base["gradients"])
        > 1e-2 * largest
    )


@each_model
def test_a_sample_with_zero_mask_changes_nothing(outcomes, model):
    """Per token nothing at all.

    Per sample it still counts among the samples, as a response that was cut off does; its content never matters.
    """
    assert_same(outcomes[model, "per token, dp4, one more without a mask"], outcomes[model, "per token"])
    assert_same(outcomes[model, "one more without a mask"], outcomes[model, "base"], factor=10 / 11)
    assert_same(outcomes[model, "another without a mask"], outcomes[model, "one more without a mask"])


@each_model
def test_equal_rewards_teach_nothing(outcomes, model):
    result = outcomes[model, "equal rewards"]
    assert result["loss"] == 0.0
    assert all(not gradient.any() for gradient in result["gradients"].values())
    assert result["entropy"] > 0


@each_model
def test_metadata_reaches_the_loss(outcomes, model):
    """From the data set's row to a user's loss: what slime drops on the way to the rank."""
    assert_same(outcomes[model, "taught by metadata"], outcomes[model, "no entropy"])


@each_model
def test_passes_without_gradients_take_larger_packs(outcomes, model):
    packs, scoring_packs = outcomes[model, "larger packs for scores"]["cut"]
    assert max(packs) <= 40 < max(scoring_packs) <= 80
    assert len(scoring_packs) < len(packs) and sum(scoring_packs) == sum(packs)
    assert outcomes[model, "base"]["cut"][1] == []
