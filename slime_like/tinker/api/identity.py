"""Which tenant asks: API keys, checked once in a while, and how much a tenant has under way at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request

from slime_like.tinker import keys
from slime_like.tinker.api.settings import ApiSettings, TenantQuota
from slime_like.tinker.errors import Refused
from slime_like.tinker.store import key_rows
from slime_like.tinker.store.rows import Rows

#: Whose everything is while there are no keys.
LOCAL = "local"
_MAX_CACHED_KEYS = 4096
#: Of the slow hash, which takes 16 MiB each time: someone who guesses keys waits for others who do.
_HASHES_AT_ONCE = 2


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who asks. limits: of its key (keys.LIMITS)."""

    name: str
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Identity:
    """Requests -> tenants."""

    def __init__(self, rows: Rows, settings: ApiSettings):
        self._rows, self._settings = rows, settings
        self._tenants: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        self._hashing = asyncio.Semaphore(_HASHES_AT_ONCE)
        self._keys_seen = False

    async def tenant_of(self, request: Request) -> Caller:
        """Raises Refused (401): no key, or one that does not count.

        While no key was ever given out, this machine alone is served, and is one tenant.
        """
        key = _key_of(request)
        if not self._keys_seen:
            # Keys are never taken out of the table, so once there is one the question is settled.
            self._keys_seen = await key_rows.any_keys(self._rows)
        if not self._keys_seen:
            return _local(request)
        if not key:
            raise Refused("no API key: X-API-Key, or Authorization: Bearer, with one of tml-…", status=401)
        # A digest, so that keys are not kept in memory, and looking one up takes as long for any of them.
        digest = hashlib.sha256(key.encode()).digest()
        deadline, tenant = self._tenants.get(digest, (0.0, None))
        if tenant is None or time.monotonic() > deadline:
            tenant = await self._verified(key)
            self._tenants[digest] = (time.monotonic() + self._settings.key_cache_s, tenant)
            self._tenants.move_to_end(digest)
            while len(self._tenants) > _MAX_CACHED_KEYS:
                self._tenants.popitem(last=False)
        return tenant

    async def _verified(self, key: str) -> Caller:
        key_id = keys.id_of(key)
        row = await key_rows.live_key(self._rows, key_id) if key_id else None
        if row is not None:
            async with self._hashing:
                if await asyncio.to_thread(keys.is_key_of, key, row.key_hash):
                    return Caller(row.tenant, row.limits)
        raise Refused("this API key is unknown, or was revoked", status=401)


class Load:
    """What tenants have under way in this process."""

    def __init__(self, quota: TenantQuota):
        self._quota = quota
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def request(self, tenant: Caller) -> Iterator[Callable[[int], None]]:
        """One more request, while the block runs; the block calls what it is given with the bytes that it reads.

        Both raise Refused (429) beyond the quota.
        """
        num_bytes = 0

        def take(count: int) -> None:
            nonlocal num_bytes
            limit = tenant.limits.get("body_bytes", self._quota.body_bytes)
            _check(self._bytes[tenant.name] + count, limit, "bytes of requests")
            self._bytes[tenant.name] += count
            num_bytes += count

        limit = tenant.limits.get("requests", self._quota.requests)
        _check(self._requests[tenant.name] + 1, limit, "requests")
        self._requests[tenant.name] += 1
        try:
            yield take
        finally:
            for counts, count in ((self._requests, 1), (self._bytes, num_bytes)):
                counts[tenant.name] -= count
                if not counts[tenant.name]:
                    del counts[tenant.name]


def _check(count: int, limit: float, what: str) -> None:
    if count > limit:
        raise Refused(f"{count} {what} of yours at once, and {limit:.0f} may be", status=429, retry_after_s=1.0)


def _key_of(request: Request) -> str:
    if key := request.headers.get("x-api-key"):
        return key
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _local(request: Request) -> Caller:
    """Of this machine, under one of its own names: another name would be a web page of elsewhere, whose browser was
    told that the page's host is here.
    """
    host = request.client.host if request.client else ""
    try:
        called = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:  # a Host header that is no host
        called = ""
    if not _is_loopback(host) or not _is_loopback(called):
        raise Refused(
            "no API key was given out yet, so only this machine is served. Fix: python -m slime_like.tinker.keys add",
            status=401,
        )
    return Caller(LOCAL)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
