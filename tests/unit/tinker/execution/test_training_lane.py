"""Who is served when, together with whom, and that nobody's numbers depend on it."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path

import numpy as np
import pytest

from slime_like.tinker.records import CallFailure, CallResult, Kind, StillWaiting
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_service import Client, plain_losses, rows, running_service, set_terms


def jain(shares: list[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has all (Jain, Chiu, Hawe 1984)."""
    values = np.array(shares)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


async def tenants(service, names: list[str]) -> list[Client]:
    clients = [Client(service, tenant=name, session_id=f"s-{name}") for name in names]
    for client in clients:
        await client.open_session()
        await client.do(client.creation())
    return clients


def served_order(trainer: VectorTrainer, from_verb: int) -> list[str]:
    """Whose passes ran, in order."""
    return [model for verb in trainer.log[from_verb:] if verb[0] == "passes" for model in verb[1:]]


def test_a_flood_of_one_leaves_the_others_their_share(tmp_path: Path):
    async def run() -> tuple[list[str], list[Client]]:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer, batch_tokens=1, resident_slack_tokens=0) as service:
            clients = await tenants(service, ["flood", *(f"t{n}" for n in range(5))])
            ids = []
            async with service.training.trainer_lock:
                for seed in range(40):
                    ids.append(await service.submit(clients[0].forward_backward(seed)))
                for client in clients[1:]:
                    ids.extend([await service.submit(client.forward_backward(seed)) for seed in range(6)])
                begun = len(trainer.log)
            await asyncio.gather(*(service.result(i, tenant=i_tenant(service, i), timeout_s=30) for i in ids))
            return served_order(trainer, begun), clients

    def i_tenant(service, request_id: str) -> str:
        entry = service.book.entries.get(request_id)
        return "" if entry is None else entry.tenant

    order, clients = asyncio.run(run())
    # Of the one pass that was chosen before the lock was free, and until the first of the others has all it wanted.
    while_all_wait = order[: 6 * 6]
    shares = collections.Counter(while_all_wait)
    assert len(shares) == 6 and jain([shares[client.model_id] for client in clients]) >= 0.95
    assert len(order) == 70


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_a_tenants_weight_is_its_share(tmp_path: Path, weight: float):
    async def run() -> list[str]:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer, batch_tokens=1, resident_slack_tokens=0) as service:
            await set_terms(service, "paying", weight=weight)
            clients = await tenants(service, ["paying", "other"])
            ids = []
            async with service.training.trainer_lock:
                for seed in range(60):
                    ids.extend([(client, await service.submit(client.forward_backward(seed))) for client in clients])
                begun = len(trainer.log)
            for client, request_id in ids:
                await client.answer(request_id)
            return served_order(trainer, begun)

    while_both_wait = asyncio.run(run())[:60]
    expected = 60 * weight / (weight + 1)
    assert collections.Counter(while_both_wait)["s-paying:train:0"] == pytest.approx(expected, rel=0.05)


def test_ready_passes_of_several_models_run_together_up_to_the_budget(tmp_path: Path):
    async def run() -> list[tuple]:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer, batch_tokens=36) as service:
            clients = await tenants(service, list("abcde"))
            ids = []
            async with service.training.trainer_lock:
                await asyncio.sleep(0.05)
                for client in clients:  # 12 tokens each
                    ids.append((client, await service.submit(client.forward_backward(1))))
                begun = len(trainer.log)
            losses = [(await client.answer(request_id)).result.metrics["loss"] for client, request_id in ids]
            assert losses == plain_losses([1]) * 5
            return trainer.log[begun:]

    sizes = [len(verb) - 1 for verb in asyncio.run(run())]
    assert sum(sizes) == 5 and max(sizes) == 3


def test_a_nan_of_one_leaves_the_others_bitwise_as_alone(tmp_path: Path):
    async def run(folder: Path, *, beside: bool) -> list[bytes]:
        folder.mkdir()
        async with running_service(folder, VectorTrainer()) as service:
            clients = await tenants(service, ["ann", "bob"] if beside else ["ann"])
            outputs = []
            for step in range(4):
                calls = [clients[0].forward_backward(step)]
                if beside:
                    poisoned = rows(step)
                    poisoned[0].inputs["weights"][:] = np.nan
                    calls.append(clients[1].next(Kind.FORWARD_BACKWARD, model_rows=poisoned, loss="x"))
                for call in calls:
                    await service.submit(call)
                ids = [await service.submit(client.optim_step()) for client in clients]
                answers = [await client.answer(request_id) for client, request_id in zip(clients, ids, strict=True)]
                result = (await clients[0].do(calls[0])).log_probs
                outputs += [
                    np.concatenate(result).tobytes(),
                    np.float64(answers[0].result["metrics"]["grad_norm"]).tobytes(),
                ]
                assert not beside or np.isnan(answers[1].result["metrics"]["grad_norm"])
            return outputs

    assert asyncio.run(run(tmp_path / "a", beside=True)) == asyncio.run(run(tmp_path / "b", beside=False))


def test_a_crash_of_one_is_repeated_alone(tmp_path: Path):
    """A bug of the trainer that shows with one tenant's rows: the others' answers come, and only its call fails."""

    class Fragile(VectorTrainer):
        async def run_passes(self, passes):
            if any(len(work.rows) == 3 for work in passes):
                raise IndexError("three rows")
            return await super().run_passes(passes)

    async def run() -> None:
        async with running_service(tmp_path, Fragile()) as service:
            clients = await tenants(service, list("abc"))
            for client in clients:
                await client.do(client.forward_backward(0))
                await client.do(client.optim_step())
            ids = []
            async with service.training.trainer_lock:
                for client, num_rows in zip(clients, (2, 3, 2), strict=True):
                    ids.append(await service.submit(client.forward_backward(1, num_rows=num_rows)))
            answers = [await client.answer(request_id) for client, request_id in zip(clients, ids, strict=True)]
            assert [type(answer) for answer in answers] == [CallResult, CallFailure, CallResult]
            assert answers[0].result.metrics["loss"] == plain_losses([0, 1])[1]
            assert answers[1].category == "server" and "IndexError: three rows" in answers[1].message
            assert (await clients[1].do(clients[1].forward_backward(1))).metrics["loss"] == plain_losses([0, 1])[1]

    asyncio.run(run())


def test_a_client_that_waits_is_told_for_what(tmp_path: Path):
    async def run() -> list[StillWaiting]:
        async with running_service(tmp_path, VectorTrainer()) as service:
            ann, bob = await tenants(service, ["ann", "bob"])
            states = []
            async with service.training.trainer_lock:
                first = await service.submit(bob.forward_backward(1))
                second = await service.submit(bob.forward_backward(2))
                bob.seq_id += 1
                behind_gap = await service.submit(bob.forward_backward(3))
                other = await service.submit(ann.forward_backward(1))
                for client, request_id in ((bob, second), (ann, other)):
                    states.append(await service.result(request_id, tenant=client.tenant, timeout_s=0.01))
            for client, request_id in ((bob, first), (bob, second), (ann, other)):
                assert isinstance(await client.answer(request_id), CallResult)
            states.append(await service.result(behind_gap, tenant="bob", timeout_s=0.01))
            return states

    own, others, gap = asyncio.run(run())
    assert own.queue_state == "paused_capacity" and "calls of other models wait too" in own.reason
    assert others.queue_state in ("paused_capacity", "active")
    assert gap.queue_state == "paused_capacity" and "seq_id 3 of s-bob:train:0, which has not come" in gap.reason
