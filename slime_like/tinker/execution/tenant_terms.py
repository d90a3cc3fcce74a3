"""How much of the server each tenant has: what the keys' command has written, else what holds for all."""

from __future__ import annotations

from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import TenantRow
from slime_like.tinker.store.tenant_rows import all_terms


class TenantTerms:
    """As they were at the last `refresh`: the sweeper's, so a change counts within sweep_every_s."""

    def __init__(self, database: Database, settings: ServiceSettings):
        self._database, self._settings = database, settings
        self._rows: dict[str, TenantRow] = {}

    async def refresh(self) -> None:
        """Read them anew."""
        self._rows = await all_terms(self._database)

    def weight(self, tenant: str) -> float:
        """Its share beside a tenant's of weight 1."""
        row = self._rows.get(tenant)
        return 1.0 if row is None or row.weight is None else row.weight

    def max_requests(self, tenant: str) -> int:
        """Under way at a time."""
        row = self._rows.get(tenant)
        return self._settings.max_requests_a_tenant if row is None or row.max_requests is None else row.max_requests

    def max_tokens(self, tenant: str) -> int:
        """Of the requests that are under way."""
        row = self._rows.get(tenant)
        return self._settings.max_tokens_a_tenant if row is None or row.max_tokens is None else row.max_tokens
