"""--tenant-micro-batches shared, through the server's own backend: the numbers of `own` up to rounding, in fewer
micro-batches; a pass that fails among others leaves them as if it had not come.
"""

# Covers slime_like.megatron_backend.lora.tenants and slime_like.megatron_backend.lora.tenant_runner too.

import asyncio
import dataclasses

import numpy as np
import pytest

from slime_like.config.lora import LoraConfig
from slime_like.tinker.backends.trainer import GroupTraining, TrainerOptions
from slime_like.tinker.records import AdamSettings, ModelSpec
from tests.helpers.tenants import loss_rows, one_pass, trainer_of_tenants, whole_numbers
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import free_ports, make_samples, run_ranks

pytestmark = pytest.mark.multiprocess

#: model -> its rank
MODELS = {"ann": 4, "bob": 8, "cid": 3}


class OneRank:
    """A worker of this process as the server's group of ranks."""

    def __init__(self, worker):
        self.worker = worker

    def tenants(self, method, *args):
        return getattr(self.worker, method)(*args)

    def in_step(self):
        return True

    def close(self):
        pass


def rows_of(name, *, weight=1.0):
    rows = loss_rows(make_samples(3, seed=sorted(MODELS).index(name[:3])))
    spoiled = dataclasses.replace(rows[1], inputs={n: (x * np.float32(weight)) for n, x in rows[1].inputs.items()})
    return (rows[0], spoiled, *rows[2:])


async def trained(worker, names, *, shared, spoiled=(), broken=()):
    """Losses, log-probs, gradients and weights of two steps; whose rows weigh infinitely, whose adapters are NaN."""
    options = TrainerOptions(
        base_model="tiny", model=worker.config.model, context_length=64, lora_alpha=8.0, max_rank=16, max_resident=8,
        shares_micro_batches=shared,
    )  # fmt: skip
    backend = GroupTraining(lambda: OneRank(worker), options)
    await backend.begin()
    for name in names:
        await backend.create(ModelSpec(model_id=name, tenant=name, base_model="tiny", lora_rank=MODELS[name], seed=1))
        if name in broken:
            worker._tenants._tenants[name].memory.master.fill_(float("nan"))
    runner = worker._tenants._runner
    before = runner.num_micro_batches, runner.num_shared_micro_batches
    result = {name: {"answers": [], "gradients": []} for name in names}
    for _ in range(2):
        passes = [one_pass(name, rows_of(name, weight=np.inf if name in spoiled else 1.0)) for name in names]
        for name, answer in zip(names, await backend.run_passes(passes), strict=True):
            result[name]["answers"].append(answer)
        for name in names:
            if name not in (*spoiled, *broken):
                result[name]["gradients"].append(whole_numbers(worker, name, "gradient"))
                await backend.optim_step(name, AdamSettings(learning_rate=1e-2, eps=1.0))
    counts = runner.num_micro_batches - before[0], runner.num_shared_micro_batches - before[1]
    for name in names:
        result[name]["weights"] = whole_numbers(worker, name)
        await backend.release(name)
    return result, counts


def counted_rows(place, base, port):
    """Micro-batches of three rows with gradients, of the same without, and the log-probs of both."""
    sizes = {"micro_batch_size": 1, "log_probs_micro_batch_size": 2}
    worker = trainer_of_tenants(place, base, {}, num_ranks=1, port=port, batch=sizes)
    worker.add_tenant("ann", LoraConfig(lora_rank=4), 1)
    counts, log_probs = [], []
    for forward_only in (False, True):
        before = worker._tenants._runner.num_micro_batches
        (answer,) = worker.run_passes([one_pass("ann", rows_of("ann"), forward_only=forward_only)])
        counts.append(worker._tenants._runner.num_micro_batches - before)
        log_probs.append(answer.log_probs)
    worker.close()
    return counts, log_probs


def in_one_process(place, base, ports):
    worker = trainer_of_tenants(
        place, base, {}, num_ranks=1, port=ports[0], batch={"use_dynamic_batch_size": True, "max_tokens_per_gpu": 256}
    )
    outcomes = {
        "own": asyncio.run(trained(worker, list(MODELS), shared=False)),
        "shared": asyncio.run(trained(worker, list(MODELS), shared=True)),
        "shared by two": asyncio.run(trained(worker, ["ann", "cid"], shared=True)),
        "beside infinite weights": asyncio.run(trained(worker, list(MODELS), shared=True, spoiled=["bob"])),
        "beside NaN": asyncio.run(trained(worker, list(MODELS), shared=True, broken=["bob"])),
    }
    worker.close()
    outcomes["counted rows"] = counted_rows(place, base, ports[1])
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    base = make_tiny_model(str(tmp_path_factory.mktemp("model") / "qwen3"), "qwen3", num_layers=2)
    return run_ranks(in_one_process, 1, base, free_ports(2), timeout_s=120)[0]


def test_losses_gradients_and_weights_are_those_of_own_micro_batches(outcomes):
    (own, _), (shared, _) = outcomes["own"], outcomes["shared"]
    for name in MODELS:
        for step in range(2):
            mine, theirs = shared[name]["answers"][step], own[name]["answers"][step]
            assert mine.metrics["loss"] == pytest.approx(theirs.metrics["loss"], rel=1e-6)
            for row, expected in zip(mine.log_probs, theirs.log_probs, strict=True):
                np.testing.assert_allclose(row, expected, atol=1e-6, rtol=0)
            for key, gradient in own[name]["gradients"][step].items():
                most = max(np.abs(gradient).max(), 1.0)
                np.testing.assert_allclose(shared[name]["gradients"][step][key], gradient, atol=1e-6 * most, rtol=0)
        for key, matrix in own[name]["weights"].items():
            np.testing.assert_allclose(shared[name]["weights"][key], matrix, atol=1e-6, rtol=0, err_msg=key)
    assert own["ann"]["answers"][1].metrics["loss"] < own["ann"]["answers"][0].metrics["loss"]


def test_the_passes_share_micro_batches(outcomes):
    assert outcomes["own"][1] == (6, 0)  # two steps of three models
    assert outcomes["shared"][1] == (2, 2)


@pytest.mark.parametrize("setting", ["beside infinite weights", "beside NaN"])
def test_a_pass_that_fails_leaves_the_others_as_if_it_had_not_come(outcomes, setting):
    (without, _), (beside, counts) = outcomes["shared by two"], outcomes[setting]
    for name in ("ann", "cid"):
        for mine, expected in zip(beside[name]["answers"], without[name]["answers"], strict=True):
            assert mine.metrics == expected.metrics
        for key, matrix in without[name]["weights"].items():
            np.testing.assert_array_equal(beside[name]["weights"][key], matrix, err_msg=key)
    assert all("Nothing of the pass is kept" in answer for answer in beside["bob"]["answers"])
    # All three, bob alone, the others again; in the second step bob is alone from the start.
    assert counts == (5, 3)


def test_passes_without_gradients_have_micro_batches_of_their_own_size(outcomes):
    (training, scoring), (mine, theirs) = outcomes["counted rows"]
    assert (training, scoring) == (3, 2)
    for row, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6, rtol=0)
