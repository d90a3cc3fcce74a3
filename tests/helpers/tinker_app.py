"""The API over tests.helpers.tinker_bigrams, served on a port of this machine from a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from slime_like.tinker.api.app import make_app
from slime_like.tinker.api.settings import ApiSettings, ServedModel
from slime_like.tinker.store.database import Database
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_bigrams import BASE, BigramService
from tests.helpers.tinker_service import running_service

MODEL = ServedModel(name=BASE, context_length=128, tokenizer=BASE)
_START_S = 30


@dataclasses.dataclass
class Served:
    """A server that runs. run(coroutine) does it on the server's own loop."""

    url: str
    service: Any
    database: Database
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine) -> Any:
        """Its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_START_S)


@contextlib.contextmanager
def serve(folder: Path, settings: ApiSettings | None = None, *, real: bool = False) -> Iterator[Served]:
    """Until the block ends. real: over the server's own service, with a trainer and engines of vectors."""
    ready: threading.Event = threading.Event()
    box: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, settings, real, ready, box)), daemon=True)
    thread.start()
    assert ready.wait(_START_S), "the server did not start"
    try:
        yield box["served"]
    finally:
        box["server"].should_exit = True
        thread.join(_START_S)


async def _serve(
    folder: Path, settings: ApiSettings | None, real: bool, ready: threading.Event, box: dict[str, Any]
) -> None:
    async with _service(folder, real) as (service, database):
        app = make_app(service, database, settings or ApiSettings(models=(MODEL,), poll_s=0.5))
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=2)
        box["server"] = server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            assert not task.done(), "the server ended at its start"
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        box["served"] = Served(f"http://127.0.0.1:{port}", service, database, asyncio.get_running_loop())
        ready.set()
        await task


@contextlib.asynccontextmanager
async def _service(folder: Path, real: bool) -> AsyncIterator[tuple[Any, Database]]:
    if real:
        async with running_service(folder, VectorTrainer()) as service:
            yield service, service.database
        return
    database = Database(f"sqlite:///{folder}/tinker.db")
    await database.upgrade()
    yield BigramService(database, folder / "weights"), database
    await database.close()
