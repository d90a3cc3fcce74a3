"""API keys: what is kept of them, and the command."""

from __future__ import annotations

import asyncio
import re
import sqlite3

import pytest

from slime_like.tinker import keys


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/tinker.db"


def run(capsys, *argv: str) -> tuple[int, str]:
    status = keys.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out.strip() + captured.err.strip()


def test_a_key_is_told_from_another_by_its_hash():
    one, other = keys.new_key(), keys.new_key()
    assert one.startswith("tml-") and keys.id_of(one) == one[:16] and keys.id_of("tml-abc") is None
    key_hash = keys.hash_key(one)
    assert keys.is_key_of(one, key_hash) and not keys.is_key_of(other, key_hash)
    assert keys.hash_key(one) != key_hash, "each has a salt of its own"
    # hashlib.scrypt itself, with the parameters written out
    import hashlib

    _, salt, digest = key_hash.split("$")
    assert hashlib.scrypt(one.encode(), salt=bytes.fromhex(salt), n=16384, r=8, p=1).hex() == digest


def test_add_list_revoke(capsys, url, tmp_path):
    status, key = run(capsys, "add", "--db", url, "--tenant", "ann", "--limits", '{"requests": 5}')
    assert status == 0 and re.fullmatch(r"tml-[0-9a-f]{12}-[A-Za-z0-9_-]{43}", key)
    _, second = run(capsys, "add", "--db", url, "--tenant", "ann")
    _, listed = run(capsys, "list", "--db", url)
    assert listed.count("counts") == 2 and '{"requests": 5}' in listed
    assert key not in listed and second not in listed
    assert "no keys" in run(capsys, "list", "--db", url, "--tenant", "bob")[1]
    assert run(capsys, "revoke", "--db", url, "--tenant", "ann", "--key", key[:16]) == (0, f"{key[:16]} revoked")
    assert run(capsys, "list", "--db", url)[1].count("revoked") == 1
    assert run(capsys, "revoke", "--db", url, "--tenant", "ann") == (0, f"{second[:16]} revoked")
    dump = "\n".join(sqlite3.connect(tmp_path / "tinker.db").iterdump())
    assert key[17:] not in dump and second[17:] not in dump, "the secret is nowhere in the file"


def test_mistakes_exit_with_2(capsys, url):
    assert run(capsys, "add", "--db", url, "--tenant", "a b")[0] == 2
    status, message = run(capsys, "add", "--db", url, "--tenant", "ann", "--limits", '{"speed": 1}')
    assert status == 2 and "no speed. It has: requests, body_bytes." in message
    assert run(capsys, "revoke", "--db", url, "--tenant", "ann")[0] == 2
    with pytest.raises(SystemExit) as left:
        keys.main(["add", "--db", url, "--tenant", "ann", "--limits", '{"requests": -1}'])
    assert left.value.code == 2


def test_adding_from_python(url):
    from slime_like.tinker.store.database import Database

    async def add() -> str:
        database = Database(url)
        await database.upgrade()
        key = await keys.add(database, "ann", {})
        await database.close()
        return key

    assert keys.id_of(asyncio.run(add()))
