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


def test_a_tenants_share_is_given_with_its_key_and_changed_later(capsys, url):
    run(capsys, "add", "--db", url, "--tenant", "ann", "--weight", "2", "--max-requests", "10", "--max-tokens", "1000")
    run(capsys, "add", "--db", url, "--tenant", "ann")  # another key of it says nothing of that
    run(capsys, "add", "--db", url, "--tenant", "bob")
    ann, again, bob = run(capsys, "list", "--db", url)[1].splitlines()
    for line in (ann, again):
        assert line.endswith("weight 2  max_requests 10  max_tokens 1000")
    assert bob.endswith("{}")
    changed = run(capsys, "share", "--db", url, "--tenant", "ann", "--weight", "0.5", "--max-tokens", "default")
    assert changed == (0, "ann  weight 0.5  max_requests 10")
    unsaid = run(capsys, "share", "--db", url, "--tenant", "ann", "--weight", "default", "--max-requests", "default")
    assert unsaid == (0, "ann  as all others")
    assert "weight" not in run(capsys, "list", "--db", url)[1]


@pytest.mark.parametrize(
    "wrong", [["--weight", "0"], ["--weight", "-1"], ["--weight", "inf"], ["--weight", "nan"], ["--max-tokens", "0"]]
)
def test_a_share_is_a_number_above_0(capsys, url, wrong):
    with pytest.raises(SystemExit) as left:
        keys.main(["share", "--db", url, "--tenant", "ann", *wrong])
    assert left.value.code == 2


def test_mistakes_exit_with_2(capsys, url):
    assert run(capsys, "add", "--db", url, "--tenant", "a b")[0] == 2
    status, message = run(capsys, "add", "--db", url, "--tenant", "ann", "--limits", '{"speed": 1}')
    assert status == 2 and "no speed. It has: requests, body_bytes." in message
    assert run(capsys, "revoke", "--db", url, "--tenant", "ann")[0] == 2
    status, message = run(capsys, "share", "--db", url, "--tenant", "ann")
    assert status == 2 and "any of --weight, --max-requests, --max-tokens" in message
    status, message = run(capsys, "share", "--db", url, "--tenant", "ann", "--weight", "2")
    assert status == 2 and "'ann' has no keys" in message
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
