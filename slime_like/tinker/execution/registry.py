"""The models that have calls, or were used a moment ago."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.records import ModelSpec
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import find_model


class ModelRegistry:
    """One ModelQueue a model, read from the database when it is first asked for."""

    def __init__(self, database: Database):
        self._database = database
        self.models: dict[str, ModelQueue] = {}
        self._pins: dict[str, int] = {}
        self._reading = asyncio.Lock()

    async def get(self, model_id: str) -> ModelQueue | None:
        """The model's; None: there is no such model, or it takes no calls any more."""
        if model_id in self.models:
            return self._living(model_id)
        async with self._reading:
            if model_id in self.models:
                return self._living(model_id)
            row = await find_model(self._database, model_id)
            if row is None or row.released is not None:
                return None
            model = ModelQueue(
                ModelSpec(**row.spec),
                row.session_id,
                done_seq=row.done_seq,
                snapshot_seq=row.snapshot_seq,
                snapshot=row.snapshot,
            )
            self.models[model_id] = model
            return model

    def _living(self, model_id: str) -> ModelQueue | None:
        model = self.models[model_id]
        return None if model.has_ended else model

    @contextlib.contextmanager
    def pinned(self, model_id: str) -> Iterator[None]:
        """It is not forgotten within: a call is being written that it will get."""
        self._pins[model_id] = self._pins.get(model_id, 0) + 1
        try:
            yield
        finally:
            self._pins[model_id] -= 1
            if not self._pins[model_id]:
                del self._pins[model_id]

    def forget(self, model_id: str) -> bool:
        """Drop it from memory where nothing waits; the database has all that is needed to come back."""
        model = self.models.get(model_id)
        if model is None or model.waiting or model_id in self._pins:
            return False
        del self.models[model_id]
        return True
