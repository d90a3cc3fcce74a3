"""What tenants have of the server, in the database."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select

from slime_like.tinker.store.rows import Rows
from slime_like.tinker.store.tables import TenantRow

#: What can be said of a tenant.
TERMS = ("weight", "max_requests", "max_tokens")


async def set_terms(rows: Rows, tenant: str, changes: Mapping[str, float | None]) -> None:
    """Write those of TERMS that are named; None: as for tenants of whom nothing is said."""
    async with rows.write() as session:
        row = await session.get(TenantRow, tenant)
        if row is None:
            row = TenantRow(tenant=tenant)
            session.add(row)
        for name, value in changes.items():
            setattr(row, name, value)


async def all_terms(rows: Rows) -> dict[str, TenantRow]:
    """Of every tenant of whom something was said."""
    async with rows.read() as session:
        return {row.tenant: row for row in await session.scalars(select(TenantRow))}
