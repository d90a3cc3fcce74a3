"""What was said of a tenant holds for it, and the settings for all others."""

# Covers slime_like.tinker.store.tenant_rows too.

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime_like.tinker.errors import Refused
from slime_like.tinker.store import tenant_rows
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_service import Client, running_service


def test_a_running_server_takes_up_what_is_said_and_unsaid(tmp_path: Path):
    settings = {"sweep_every_s": 0.02, "max_requests_a_tenant": 9, "max_tokens_a_tenant": 900}

    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), **settings) as service:
            terms = service.book.terms

            def numbers(tenant: str) -> tuple[float, int, int]:
                return terms.weight(tenant), terms.max_requests(tenant), terms.max_tokens(tenant)

            async def until(expected: tuple[float, int, int]) -> None:
                async with asyncio.timeout(10):
                    while numbers("ann") != expected:
                        await asyncio.sleep(0.01)

            assert numbers("ann") == (1.0, 9, 900)
            await tenant_rows.set_terms(service.database, "ann", {"weight": 2.0, "max_requests": 3})
            await until((2.0, 3, 900))
            await tenant_rows.set_terms(service.database, "ann", {"weight": None, "max_tokens": 2**40})
            await until((1.0, 3, 2**40))
            assert numbers("bob") == (1.0, 9, 900)

    asyncio.run(run())


@pytest.mark.parametrize(("terms", "most"), [({"max_requests": 2}, 2), ({"max_tokens": 30}, 2), ({}, 4)])
def test_a_tenants_own_limits_count(tmp_path: Path, terms: dict[str, int], most: int):
    """Calls of 12 tokens that wait for one that is missing; another tenant's limits are others."""

    async def run() -> list[int]:
        async with running_service(tmp_path, VectorTrainer(), max_requests_a_tenant=4) as service:
            await tenant_rows.set_terms(service.database, "ann", terms)
            await service.book.terms.refresh()
            counts = []
            for client in (Client(service), Client(service, tenant="bob", session_id="s2")):
                await client.open_session()
                await client.do(client.creation())
                client.seq_id += 1
                taken = 0
                with pytest.raises(Refused, match="Come again"):
                    while taken < 10:
                        await service.submit(client.forward_backward(taken))
                        taken += 1
                counts.append(taken)
            return counts

    assert asyncio.run(run()) == [most, 4]
