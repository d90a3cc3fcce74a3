"""What the database said a moment ago of sessions and samplers: thousands of requests ask for the same few.

The service asks the database itself before it takes a call, so that what ends meanwhile is refused there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from slime_like.tinker.store import clients
from slime_like.tinker.store.rows import Rows
from slime_like.tinker.store.tables import SamplerRow

_MAX_KNOWN = 8192


class Known:
    """Of one app. seconds: how long an answer counts, and is kept."""

    def __init__(self, rows: Rows, seconds: float = 2.0):
        self._rows, self._seconds = rows, seconds
        self._answers: OrderedDict[tuple[str, str], tuple[float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    async def session(self, session_id: str, tenant: str) -> None:
        """As clients.check_session. Raises Refused (404, 410)."""
        await self._ask(session_id, tenant, clients.check_session)

    async def sampler(self, sampler_id: str, tenant: str) -> SamplerRow:
        """As clients.get_sampler. Raises Refused (404, 410)."""
        return await self._ask(sampler_id, tenant, clients.get_sampler)

    def forget(self, session_id: str, tenant: str) -> None:
        """A session, and its samplers, have changed."""
        for key in [key for key in self._answers if key[1] == tenant and key[0].partition(":")[0] == session_id]:
            del self._answers[key]

    async def _ask(self, row_id: str, tenant: str, question: Callable[[Rows, str, str], Awaitable[Any]]) -> Any:
        key = (row_id, tenant)  # an answer is one tenant's: another's question has another
        deadline, answer = self._answers.get(key, (0.0, None))
        if time.monotonic() < deadline:
            return answer
        answer = await question(self._rows, row_id, tenant)  # a refusal is not kept
        self._answers[key] = (time.monotonic() + self._seconds, answer)
        self._answers.move_to_end(key)
        while len(self._answers) > _MAX_KNOWN or next(iter(self._answers.values()))[0] < time.monotonic():
            self._answers.popitem(last=False)
        return answer
