"""The trainer's verbs as the service calls them: in turn, and what becomes of ranks that are lost."""

import asyncio
import dataclasses
import threading
import time

import pytest

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError, RunError
from slime_like.tinker.backends.trainer import GroupTraining, TrainerOptions, lora_of
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import AdamSettings, ModelSpec

DENSE = model_from_hf(read_hf_config("models/tiny-qwen3"), ModelConfig())
MOE = model_from_hf(read_hf_config("models/tiny-qwen3-moe"), ModelConfig())
OPTIONS = TrainerOptions(
    base_model="tiny", model=DENSE, context_length=64, lora_alpha=32.0, max_rank=16, max_resident=2
)


class Ranks:
    """Ranks that say what they were asked for; `faults` are raised in turn, and `steps` says what in_step finds."""

    def __init__(self, faults: list[Exception | None] | None = None, *, steps: bool = True):
        self.faults, self.steps = faults or [], steps
        self.calls: list[tuple] = []
        self.inside = self.most = 0
        self.closed = False
        self._lock = threading.Lock()

    def tenants(self, method, *args):
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.inside -= 1
        self.calls.append((method, *args))
        if method != "limit_tenants" and self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return {"train/lr": 1.0}

    def in_step(self):
        return self.steps

    def close(self):
        self.closed = True


def spec(**changes) -> ModelSpec:
    return ModelSpec(**{"model_id": "m", "tenant": "t", "base_model": "tiny", "lora_rank": 4, **changes})


def backend(*groups: Ranks) -> GroupTraining:
    left = list(groups)
    return GroupTraining(lambda: left.pop(0), OPTIONS)


def test_verbs_come_one_after_the_other():
    ranks = Ranks()

    async def body():
        trainer = backend(ranks)
        await trainer.begin()
        await trainer.create(spec(seed=7))
        await asyncio.gather(*(trainer.optim_step("m", AdamSettings(learning_rate=0.1)) for _ in range(5)))
        await trainer.release("m")
        await trainer.release("m")
        await trainer.close()

    asyncio.run(body())
    assert ranks.most == 1 and ranks.closed
    assert [call[0] for call in ranks.calls] == ["limit_tenants", "add_tenant", *["tenant_step"] * 5, "drop_tenant"]
    assert ranks.calls[0][1] == 2
    _, name, lora, seed = ranks.calls[1]
    assert (name, lora.lora_rank, lora.alpha, seed) == ("m", 4, 32.0, 7)
    params, clip = ranks.calls[2][2:]
    assert (params.lr, params.betas, params.eps, clip) == (0.1, (0.9, 0.95), 1e-12, 0.0)


@pytest.mark.parametrize("shared", [False, True])
def test_the_ranks_are_told_whether_models_share_micro_batches(shared):
    ranks = Ranks()

    async def body():
        trainer = GroupTraining(lambda: ranks, dataclasses.replace(OPTIONS, shares_micro_batches=shared))
        await trainer.begin()
        await trainer.run_passes([])

    asyncio.run(body())
    assert ranks.calls[-1] == ("run_passes", [], shared)


def test_a_client_that_went_away_leaves_no_verb_half_done():
    ranks = Ranks()

    async def body():
        trainer = backend(ranks)
        await trainer.begin()
        task = asyncio.create_task(trainer.save_sampler("m", "folder"))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await trainer.save_sampler("n", "other")

    asyncio.run(body())
    assert [call[1] for call in ranks.calls[1:]] == ["m", "n"] and ranks.most == 1


def test_a_clients_mistake_is_told_and_the_ranks_go_on():
    ranks = Ranks([None, CheckpointError("no such folder")])

    async def body():
        trainer = backend(ranks)
        await trainer.begin()
        await trainer.create(spec())
        with pytest.raises(RunError, match="no such folder") as caught:
            await trainer.load_state("m", "folder", optimizer=True)
        assert not isinstance(caught.value, BackendLost)
        with pytest.raises(RunError, match="lr -1"):
            await trainer.optim_step("m", AdamSettings(learning_rate=-1))
        await trainer.optim_step("m", AdamSettings(learning_rate=1))

    asyncio.run(body())
    assert not ranks.closed


def test_ranks_that_are_lost_are_started_anew_and_hold_nothing():
    first, second = Ranks([None, RunError("trainer rank 0 died")], steps=False), Ranks()

    async def body():
        trainer = backend(first, second)
        await trainer.begin()
        await trainer.create(spec())
        with pytest.raises(BackendLost, match="rank 0 died"):
            await trainer.run_passes([])
        await trainer.create(spec())  # it is not there: nothing is to be dropped first

    asyncio.run(body())
    assert first.closed
    assert [call[0] for call in second.calls] == ["limit_tenants", "add_tenant"]


def test_where_no_ranks_start_every_call_tries_again():
    starts: list = [Ranks([RunError("died")], steps=False), RunError("no GPU"), RunError("no GPU"), Ranks()]

    def start():
        group = starts.pop(0)
        if isinstance(group, Exception):
            raise group
        return group

    async def body():
        trainer = GroupTraining(start, OPTIONS)
        await trainer.begin()
        with pytest.raises(BackendLost, match="did not start anew: no GPU"):
            await trainer.run_passes([])
        with pytest.raises(BackendLost, match="no GPU"):
            await trainer.run_passes([])
        with pytest.raises(BackendLost, match="started anew"):
            await trainer.run_passes([])
        await trainer.run_passes([])

    asyncio.run(body())


def test_which_modules_a_client_trains():
    def targets(model=DENSE, **changes):
        return lora_of(spec(**changes), model, default_alpha=32, max_rank=16).lora_target_modules

    attention, mlp = ["k_proj", "o_proj", "q_proj", "v_proj"], ["down_proj", "gate_proj", "up_proj"]
    assert targets() == sorted(attention + mlp)
    assert targets(train_mlp=False) == attention and targets(train_attn=False) == mlp
    assert targets(model=MOE) == attention
    lora = lora_of(spec(lora_alpha=8.0), MOE, default_alpha=32, max_rank=16)
    assert lora.alpha == 8.0 and not lora.target_problems(MOE) and not lora.problems()
    assert lora_of(spec(lora_rank=0), DENSE, default_alpha=32, max_rank=16) is None
    with pytest.raises(RunError, match="nothing is left"):
        targets(train_attn=False, train_mlp=False)
    for rank in (-1, 17):
        with pytest.raises(RunError, match=f"lora_rank {rank}"):
            targets(lora_rank=rank)
