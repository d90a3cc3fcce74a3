"""API keys of tenants, and their shares: `python -m slime_like.tinker.keys add|share|list|revoke --db URL …`.

A key is `tml-` (which clients look for), 12 hexadecimal digits that it is looked up by, and 32 random bytes. Only its
scrypt hash (RFC 7914) is kept, so a copy of the database opens nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import hmac
import json
import math
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from slime_like.errors import UserError
from slime_like.tinker.store import key_rows, tenant_rows
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.rows import Rows

#: 2^14 blocks of 8 x 128 bytes: 16 MiB and some 50 ms a guess.
_COST = {"n": 2**14, "r": 8, "p": 1}
_SALT_BYTES = 16
_KEY_FORM = re.compile(r"(tml-[0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_TENANT_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Typed instead of a number: what holds for all.
_DEFAULT = "default"
#: What a key may say of the HTTP requests that come with it (ApiKeyRow.limits), beside the server's own settings.
LIMITS = ("requests", "body_bytes")


def new_key() -> str:
    """A key that nobody has."""
    return f"tml-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"


def id_of(key: str) -> str | None:
    """What a key is looked up by; None for what is no key of ours."""
    match = _KEY_FORM.fullmatch(key)
    return match[1] if match else None


def hash_key(key: str, salt: bytes | None = None) -> str:
    """`scrypt$SALT$HASH` in hexadecimal digits."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return f"scrypt${salt.hex()}${hashlib.scrypt(key.encode(), salt=salt, **_COST).hex()}"


def is_key_of(key: str, key_hash: str) -> bool:
    """Whether a key has this hash; takes as long for a wrong one."""
    salt = bytes.fromhex(key_hash.split("$")[1])
    return hmac.compare_digest(hash_key(key, salt).encode(), key_hash.encode())


async def add(
    rows: Rows, tenant: str, limits: Mapping[str, Any], terms: Mapping[str, float | None] | None = None
) -> str:
    """A new key of a tenant; this is the only time that it can be read. terms: of the tenant's, those that change.

    Raises UserError for a name that is none.
    """
    if not _TENANT_FORM.fullmatch(tenant):
        raise UserError(f"--tenant {tenant!r}: a name is 1 to 128 letters, digits, '.', '_' and '-'.")
    if unknown := sorted(set(limits) - set(LIMITS)):
        raise UserError(f"--limits has no {', '.join(unknown)}. It has: {', '.join(LIMITS)}.")
    key = new_key()
    await key_rows.add_key(rows, str(id_of(key)), tenant, hash_key(key), limits)
    if terms:
        await tenant_rows.set_terms(rows, tenant, terms)
    return key


async def _run(arguments: argparse.Namespace) -> str:
    database = Database(arguments.db)
    try:
        await database.upgrade()
        if arguments.command == "add":
            return await add(database, arguments.tenant, arguments.limits, _terms_of(arguments))
        if arguments.command == "share":
            return await _share(database, arguments)
        if arguments.command == "list":
            listed = await key_rows.list_keys(database, arguments.tenant)
            terms = await tenant_rows.all_terms(database)
            return (
                "\n".join(_line(row, terms.get(row.tenant)) for row in listed)
                or "no keys: the server takes any, from this machine only"
            )
        ended = await key_rows.revoke_keys(database, arguments.tenant, arguments.key)
        if not ended:
            raise UserError(f"tenant {arguments.tenant!r} has no such key that counts. Fix: list --tenant.")
        return "\n".join(f"{key_id} revoked" for key_id in ended)
    finally:
        await database.close()


async def _share(database: Database, arguments: argparse.Namespace) -> str:
    changes = _terms_of(arguments)
    if not changes:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in tenant_rows.TERMS)
        raise UserError(f"share changes what a tenant has, and nothing is given. Fix: any of {names}.")
    if not await key_rows.list_keys(database, arguments.tenant):
        raise UserError(f"tenant {arguments.tenant!r} has no keys. Fix: add --tenant {arguments.tenant}.")
    await tenant_rows.set_terms(database, arguments.tenant, changes)
    terms = await tenant_rows.all_terms(database)
    return f"{arguments.tenant}  {_words(terms.get(arguments.tenant)) or 'as all others'}"


def _terms_of(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Those that were typed; None: "default"."""
    typed = {name: getattr(arguments, name) for name in tenant_rows.TERMS if getattr(arguments, name) is not None}
    return {name: None if value == _DEFAULT else value for name, value in typed.items()}


def _words(terms: Any) -> str:
    if terms is None:
        return ""
    values = {name: getattr(terms, name) for name in tenant_rows.TERMS}
    return "  ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)


def _line(row: Any, terms: Any) -> str:
    def day(seconds: float) -> str:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M")

    state = f"revoked {day(row.revoked)}" if row.revoked is not None else "counts"
    return (
        f"{row.id}  {row.tenant}  since {day(row.created)}  {state}  {json.dumps(row.limits)}  {_words(terms)}".rstrip()
    )


def _limits(text: str) -> dict[str, Any]:
    limits = json.loads(text)
    if not isinstance(limits, dict) or not all(
        type(value) in (int, float) and 0 < value < math.inf for value in limits.values()
    ):
        raise ValueError("no object of positive numbers")
    return limits


def _weight(text: str) -> float | str:
    if text == _DEFAULT:
        return text
    if not (weight := float(text)) > 0 or math.isinf(weight):
        raise ValueError("not above 0")
    return weight


def _count(text: str) -> int | str:
    if text == _DEFAULT:
        return text
    if not 1 <= (count := int(text)) < 2**63:
        raise ValueError("not at least 1")
    return count


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for what the user must mend."""
    parser = argparse.ArgumentParser(prog="python -m slime_like.tinker.keys", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("add", "print a new key; it cannot be read again"),
        ("share", "change a tenant's share and limits; a running server takes them up within seconds"),
        ("list", "keys by what they begin with, whose they are, and whether they count"),
        ("revoke", "end one key (--key), or all of a tenant"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("--db", required=True, help="sqlite:///FILE or postgresql://…, as the server has it")
        command.add_argument("--tenant", required=name != "list", help="whose")
        if name == "add":
            command.add_argument(
                "--limits", type=_limits, default={}, help=f"JSON of {', '.join(LIMITS)}: HTTP requests of this key"
            )
        if name in ("add", "share"):
            command.add_argument("--weight", type=_weight, help="the tenant's share beside others' of weight 1")
            command.add_argument("--max-requests", type=_count, help="of the tenant's calls under way")
            command.add_argument("--max-tokens", type=_count, help="of these calls; each of the three: or default")
        if name == "revoke":
            command.add_argument("--key", help="what it begins with: tml- and 12 digits, as list prints it")
    try:
        print(asyncio.run(_run(parser.parse_args(argv))))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
