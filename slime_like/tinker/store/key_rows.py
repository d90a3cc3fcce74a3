"""API keys in the database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import exists, select

from slime_like.tinker.store.rows import Rows, now
from slime_like.tinker.store.tables import ApiKeyRow


async def add_key(rows: Rows, key_id: str, tenant: str, key_hash: str, limits: Mapping[str, Any]) -> None:
    """Write a key's hash."""
    async with rows.write() as session:
        session.add(ApiKeyRow(id=key_id, tenant=tenant, key_hash=key_hash, created=now(), limits=dict(limits)))


async def list_keys(rows: Rows, tenant: str | None) -> list[ApiKeyRow]:
    """A tenant's keys, or all, oldest first; revoked ones too."""
    query = select(ApiKeyRow).order_by(ApiKeyRow.created)
    async with rows.read() as session:
        return list(await session.scalars(query.where(ApiKeyRow.tenant == tenant) if tenant is not None else query))


async def revoke_keys(rows: Rows, tenant: str, key_id: str | None) -> list[str]:
    """End one key of a tenant's, or all of them; the ids of those that counted until now."""
    query = select(ApiKeyRow).where(ApiKeyRow.tenant == tenant, ApiKeyRow.revoked.is_(None))
    async with rows.write() as session:
        ended = list(await session.scalars(query if key_id is None else query.where(ApiKeyRow.id == key_id)))
        for row in ended:
            row.revoked = now()
        return [row.id for row in ended]


async def live_key(rows: Rows, key_id: str) -> ApiKeyRow | None:
    """The row of a key that counts."""
    async with rows.read() as session:
        row = await session.get(ApiKeyRow, key_id)
    return row if row is not None and row.revoked is None else None


async def any_keys(rows: Rows) -> bool:
    """Whether a key was ever given out: revoking the last one does not open the server to everybody."""
    async with rows.read() as session:
        return bool(await session.scalar(select(exists().where(ApiKeyRow.id.is_not(None)))))
