"""The app without a network: httpx straight into it, as an address of one's choice, and keys of tenants."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from slime_like.tinker import keys
from slime_like.tinker.api.app import make_app
from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.store.database import Database
from tests.helpers.postgres import postgres_server
from tests.helpers.tinker_app import MODEL
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_bigrams import BASE, BigramService
from tests.helpers.tinker_service import running_service


class World:
    """An app with its service and database, and a client for each tenant. executed: what was done so far."""

    def __init__(self, app, service: Any, database: Database, executed: Callable[[], Any]):
        self.app, self.service, self.database, self.executed = app, service, database, executed

    async def key(self, tenant: str, **limits: float) -> str:
        """A new key of a tenant."""
        return await keys.add(self.database, tenant, limits)

    def http(self, key: str | None, *, address: str = "127.0.0.1", host: str = "127.0.0.1") -> httpx.AsyncClient:
        """A client with a key, from an address, that calls the server by a host's name."""
        transport = httpx.ASGITransport(app=self.app, client=(address, 4711), raise_app_exceptions=False)
        headers = {} if key is None else {"X-API-Key": key}
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)


def _settings(settings: dict[str, Any]) -> ApiSettings:
    return ApiSettings(**{"models": (MODEL,), "poll_s": 0.2} | settings)


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    """Over tables of bigrams, until the block ends."""
    database = Database(f"sqlite:///{folder}/tinker.db")
    await database.upgrade()
    service = BigramService(database, folder / "weights")
    yield World(make_app(service, database, _settings(settings)), service, database, lambda: dict(service.num_runs))
    await database.close()


@contextlib.asynccontextmanager
async def real_world(folder: Path, url: str | None = None, **settings: Any) -> AsyncIterator[World]:
    """Over the server's own service, with a trainer and engines of vectors; url: of another database."""
    trainer = VectorTrainer()
    async with running_service(folder, trainer, url=url) as service:
        app = make_app(service, service.database, _settings(settings))
        yield World(app, service, service.database, lambda: list(trainer.log))


@contextlib.asynccontextmanager
async def postgres_world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    """The same on PostgreSQL; skips where there is none."""
    with postgres_server() as url:
        async with real_world(folder, url, **settings) as there:
            yield there


async def finished(http: httpx.AsyncClient, answer: httpx.Response) -> dict:
    """What a future becomes."""
    assert answer.status_code == 200, answer.text
    done = None
    while done is None or done.json().get("type") == "try_again":
        done = await http.post("/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]})
    assert done.status_code == 200 and "error" not in done.json(), done.text
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
