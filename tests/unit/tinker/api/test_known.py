"""What is remembered of sessions and samplers is one tenant's, for a while, and nothing once they end."""

from __future__ import annotations

import asyncio

import pytest

from slime_like.tinker.api.known import Known
from slime_like.tinker.errors import Refused
from slime_like.tinker.store import clients
from slime_like.tinker.store.tables import SamplerRow
from tests.helpers.tinker_http import World, trained_model, world


def test_answers_are_remembered_of_a_tenant_and_not_of_another(tmp_path):
    async def check(there: World) -> None:
        async with there.http(await there.key("ann")) as ann:
            hers = await trained_model(ann)
        known = Known(there.database, seconds=0.3)
        row = await known.sampler(hers["sampler"], "ann")
        await known.session(hers["session"], "ann")
        assert await known.sampler(hers["sampler"], "ann") is row
        for question, row_id in ((known.sampler, hers["sampler"]), (known.session, hers["session"])):
            with pytest.raises(Refused) as refused:
                await question(row_id, "bob")
            assert refused.value.status == 404
        await clients.finish_session(there.database, hers["session"], "ann", "success")
        assert await known.sampler(hers["sampler"], "ann") is row, "remembered"
        known.forget(hers["session"], "ann")
        for question, row_id in ((known.sampler, hers["sampler"]), (known.session, hers["session"])):
            with pytest.raises(Refused) as refused:
                await question(row_id, "ann")
            assert refused.value.status == 410

    async def run() -> None:
        async with world(tmp_path) as there:
            await check(there)

    asyncio.run(run())


def test_an_answer_counts_for_a_while(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as there, there.http("tml-x") as http:
            session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
            known = Known(there.database, seconds=0.1)
            await known.session(session, "local")
            await clients.finish_session(there.database, session, "local", "success")
            await asyncio.sleep(0.15)
            with pytest.raises(Refused):
                await known.session(session, "local")
            other = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
            await known.session(other, "local")
            assert len(known) == 1, "what is old takes no memory"

    asyncio.run(run())


@pytest.mark.parametrize("follows", [False, True])
def test_a_superseded_sampler_is_refused_unless_it_follows_its_model(tmp_path, follows):
    async def run() -> None:
        async with world(tmp_path) as there, there.http(await there.key("ann")) as ann:
            hers = await trained_model(ann)
            async with there.database.write() as session:
                row = await session.get(SamplerRow, hers["sampler"])
                row.superseded, row.is_inflight = 1.0, follows
            answer = await ann.get(f"/api/v1/samplers/{hers['sampler']}")
            assert answer.status_code == (200 if follows else 410)
            assert follows or "--max-ephemeral-samplers" in answer.json()["error"]

    asyncio.run(run())
