"""The app without a network: httpx straight into it, as an address of one's choice, and keys of tenants."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from slime_like.tinker import keys
from slime_like.tinker.api.app import make_app
from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.store.database import Database
from tests.helpers.tinker_app import MODEL
from tests.helpers.tinker_bigrams import BASE, BigramService


class World:
    """An app with its service and database, and a client for each tenant."""

    def __init__(self, app, service: BigramService, database: Database):
        self.app, self.service, self.database = app, service, database

    async def key(self, tenant: str, **limits: float) -> str:
        """A new key of a tenant."""
        return await keys.add(self.database, tenant, limits)

    def http(self, key: str | None, *, address: str = "127.0.0.1", host: str = "127.0.0.1") -> httpx.AsyncClient:
        """A client with a key, from an address, that calls the server by a host's name."""
        transport = httpx.ASGITransport(app=self.app, client=(address, 4711), raise_app_exceptions=False)
        headers = {} if key is None else {"X-API-Key": key}
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)


@contextlib.asynccontextmanager
async def world(folder: Path, **settings) -> AsyncIterator[World]:
    """Until the block ends."""
    database = Database(f"sqlite:///{folder}/tinker.db")
    await database.upgrade()
    service = BigramService(database, folder / "weights")
    settings.setdefault("models", (MODEL,))
    settings.setdefault("poll_s", 0.2)
    yield World(make_app(service, database, ApiSettings(**settings)), service, database)
    await database.close()


async def finished(http: httpx.AsyncClient, answer: httpx.Response) -> dict:
    """What a future becomes."""
    assert answer.status_code == 200, answer.text
    done = await http.post("/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]})
    assert done.status_code == 200, done.text
    return done.json()


async def trained_model(http: httpx.AsyncClient) -> dict[str, str]:
    """Ids of a tenant's session, model, sampler, request, and paths of what it saved."""
    session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}}
    created = await http.post("/api/v1/create_model", json=body)
    model = (await finished(http, created))["model_id"]
    saved = await http.post("/api/v1/save_weights", json={"model_id": model, "path": "state", "seq_id": 1})
    state = (await finished(http, saved))["path"]
    named = {"model_id": model, "path": "weights", "seq_id": 2}
    weights = (await finished(http, await http.post("/api/v1/save_weights_for_sampler", json=named)))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": weights}
    sampler = (await http.post("/api/v1/create_sampling_session", json=body)).json()["sampling_session_id"]
    request = created.json()["request_id"]
    return {
        "session": session,
        "model": model,
        "state": state,
        "weights": weights,
        "sampler": sampler,
        "request": request,
    }
