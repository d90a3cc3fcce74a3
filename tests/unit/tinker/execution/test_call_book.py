"""What a tenant may have under way."""

# Covers slime_like.tinker.execution.entries.

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime_like.tinker.errors import Refused
from slime_like.tinker.records import CallResult
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_service import Client, running_service


@pytest.mark.parametrize("limits", [{"max_requests_a_tenant": 3}, {"max_tokens_a_tenant": 40}])
def test_more_is_refused_with_a_time_to_come_again(tmp_path: Path, limits: dict[str, int]):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), **limits, retry_after_s=7.0) as service:
            ann, bob = Client(service), Client(service, tenant="bob", session_id="s2")
            for client in (ann, bob):
                await client.open_session()
                await client.do(client.creation())
            calls = [ann.forward_backward(seed) for seed in range(5)]  # 12 tokens each
            async with service.training.trainer_lock:
                ids = [await service.submit(call) for call in calls[1:4]]  # they wait for the first
                with pytest.raises(Refused, match="Come again") as refusal:
                    await service.submit(calls[4])
                assert (refusal.value.status, refusal.value.retry_after_s) == (429, 7.0)
                assert await service.submit(calls[2]) == ids[1]  # the same again is none more
                await service.submit(bob.forward_backward(1))  # another tenant's own
                ids.append(await service.submit(calls[0]))  # the one that the others wait for
            for request_id in ids:
                assert isinstance(await ann.answer(request_id), CallResult)
            await ann.do(calls[4])
            for _ in range(100):
                if not service.stats()["queued_requests"]:
                    break
                await asyncio.sleep(0.05)
            assert service.stats()["queued_requests"] == service.stats()["queued_tokens"] == {}

    asyncio.run(run())
