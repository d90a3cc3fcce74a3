"""A service on a folder with scripted backends, and a client's calls."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.records import LossRow
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.records import Call, CallFailure, CallResult, Kind, ModelSpec, SampleJob, StillWaiting
from slime_like.tinker.service import CallService
from slime_like.tinker.store import tenant_rows
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import SamplerRow, SessionRow
from tests.helpers.tinker_backends import VectorEngines, VectorModel, VectorTrainer

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def running_service(
    folder: Path,
    trainer: VectorTrainer,
    engines: VectorEngines | None = None,
    *,
    url: str | None = None,
    **settings: Any,
) -> AsyncIterator[CallService]:
    """A started service whose database and weights are in `folder` (or at `url`)."""
    database = Database(url or f"sqlite:///{folder / 'server.db'}")
    await database.upgrade()
    numbers = {"state_folder": str(folder / "state"), "weights_folder": str(folder / "weights")} | settings
    service = CallService(
        database, trainer, engines or VectorEngines(), ServiceSettings(**numbers), staging=folder / "staging"
    )
    await service.start()
    try:
        yield service
    finally:
        await service.close()
        await database.close()


def rows(seed: int, num_rows: int = 2, num_tokens: int = 6) -> tuple[LossRow, ...]:
    """Rows that follow from a seed."""
    source = np.random.default_rng(seed)
    return tuple(
        LossRow(
            tokens=source.integers(0, 100, num_tokens).astype(np.int32),
            targets=source.integers(0, 100, num_tokens),
            inputs={"weights": source.random(num_tokens).astype(np.float32)},
        )
        for _ in range(num_rows)
    )


@dataclasses.dataclass
class Client:
    """One model of one tenant; its calls are numbered as the SDK's are."""

    service: CallService
    tenant: str = "ann"
    session_id: str = "s1"
    number: int = 0
    seq_id: int = 0

    @property
    def model_id(self) -> str:
        """As clients make it up."""
        return f"{self.session_id}:train:{self.number}"

    async def open_session(self) -> None:
        """Write the session's row, which the API does otherwise."""
        now = time.time()
        async with self.service.database.write() as session:
            session.add(SessionRow(id=self.session_id, tenant=self.tenant, created=now, last_heartbeat=now))

    async def open_sampler(self, sampler_id: str, folder: str | None = None) -> None:
        """Write a sampler's row, which the API does otherwise."""
        row = SamplerRow(
            id=sampler_id,
            session_id=self.session_id,
            tenant=self.tenant,
            base_model="tiny",
            folder=folder,
            created=time.time(),
        )
        async with self.service.database.write() as session:
            session.add(row)

    def call(self, kind: Kind, *, seq_id: int | None = None, model_rows: tuple = (), **fields: Any) -> Call:
        """A training call."""
        return Call(
            kind=kind,
            tenant=self.tenant,
            session_id=self.session_id,
            model_id=self.model_id,
            seq_id=seq_id,
            fields=fields,
            rows=model_rows,
        )

    def creation(self, *, seed: int = 0, rank: int = 8) -> Call:
        """create_model."""
        spec = ModelSpec(model_id=self.model_id, tenant=self.tenant, base_model="tiny", lora_rank=rank, seed=seed)
        return self.call(Kind.CREATE_MODEL, spec=dataclasses.asdict(spec))

    def next(self, kind: Kind, *, model_rows: tuple = (), **fields: Any) -> Call:
        """The next training call of this client."""
        self.seq_id += 1
        return self.call(kind, seq_id=self.seq_id, model_rows=model_rows, **fields)

    def forward_backward(self, seed: int, **sizes: int) -> Call:
        """Over rows of that seed."""
        return self.next(Kind.FORWARD_BACKWARD, model_rows=rows(seed, **sizes), loss="cross_entropy", config={})

    def optim_step(self, learning_rate: float = 0.05) -> Call:
        """With the SDK's settings."""
        return self.next(Kind.OPTIM_STEP, adam={"learning_rate": learning_rate})

    def sample(self, sampler_id: str, seq_id: int, **job: Any) -> Call:
        """asample."""
        prompt = np.arange(4, dtype=np.int32)
        return Call(
            kind=Kind.SAMPLE,
            tenant=self.tenant,
            session_id=self.session_id,
            sampler_id=sampler_id,
            seq_id=seq_id,
            sample=SampleJob(sampler_id=sampler_id, prompt=prompt, **job),
        )

    async def answer(self, request_id: str) -> CallResult | CallFailure | StillWaiting | None:
        """Of the future, waited for."""
        return await self.service.result(request_id, tenant=self.tenant, timeout_s=WAIT_S)

    async def do(self, call: Call) -> Any:
        """Submit and wait; the result, or AssertionError with the failure."""
        answer = await self.answer(await self.service.submit(call))
        assert isinstance(answer, CallResult), answer
        return answer.result


async def set_terms(service: CallService, tenant: str, **terms: float) -> None:
    """What `python -m slime_like.tinker.keys share` writes, taken up."""
    await tenant_rows.set_terms(service.database, tenant, terms)
    await service.book.terms.refresh()


def plain_losses(seeds: list[int], *, model_seed: int = 0, learning_rate: float = 0.05, **sizes: int) -> list[float]:
    """What forward_backward and optim_step over rows of these seeds, one after the other, give: the losses."""
    from slime_like.records import TenantPass
    from slime_like.tinker.records import AdamSettings

    model, losses = VectorModel(model_seed), []
    for seed in seeds:
        work = TenantPass(weights="plain", rows=rows(seed, **sizes), loss="cross_entropy")
        losses.append(model.run(work).metrics["loss"])
        model.step(AdamSettings(learning_rate=learning_rate))
    return losses
