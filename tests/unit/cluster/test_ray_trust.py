"""A Ray cluster is joined because a file names it only if nobody else can have written that file.

Ours is closed to others.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from slime_like.cluster.ray_session import running_cluster
from slime_like.cluster.ray_trust import ensure_token, private_folder, recorded_cluster
from slime_like.errors import PlacementError
from tests.helpers.other_user import UID, needs_root, stranger_listening


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty temporary folder for Ray, open to all as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


@pytest.fixture
def our_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def record(folder: Path, port: int) -> Path:
    """A record as Ray writes it: in a folder that it has opened to everyone."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    file = folder / "ray_current_cluster"
    file.write_text(f"127.0.0.1:{port}")
    file.chmod(0o644)
    return file


def refused(why: str) -> None:
    assert running_cluster() is None
    assert why in str(recorded_cluster().refused)


def test_our_own_record_of_a_cluster_that_runs_is_believed(root, our_port):
    record(root / "ray", our_port)
    assert running_cluster() == f"127.0.0.1:{our_port}"


def test_the_cluster_of_the_run_scripts_comes_first(root, our_port):
    private = root / f"slime_like-{os.geteuid()}"
    private.mkdir(mode=0o700)
    record(private / "ray", our_port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        record(root / "ray", other.getsockname()[1])
        assert running_cluster() == f"127.0.0.1:{our_port}"


def test_a_record_of_a_cluster_that_is_gone_is_not_talked_about(root, our_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        record(root / "ray", server.getsockname()[1])
    assert running_cluster() is None and recorded_cluster().refused is None


@needs_root
def test_another_users_record_is_refused(root):
    with stranger_listening() as (port, _):
        os.chown(record(root / "ray", port), UID, UID)
        refused(f"ray_current_cluster belongs to user {UID}")


@needs_root
@pytest.mark.parametrize("name", ["ray", f"slime_like-{os.geteuid()}/ray"])
def test_a_record_in_another_users_folder_is_refused_even_if_it_is_ours(root, our_port, name):
    record(root / name, our_port)
    os.chown((root / name.split("/")[0]), UID, UID)
    refused(f"{name.split('/')[0]} belongs to user {UID}")


@needs_root
def test_our_old_record_does_not_lead_to_who_took_the_port_since(root):
    """Ray leaves the file when it ends, and its folder lets everyone put an old one back."""
    with stranger_listening() as (port, _):
        record(root / "ray", port)
        refused(f"user {UID} listens there")


def test_a_record_that_cannot_be_read_is_refused(root, our_port):
    file = record(root / "ray", our_port)
    file.unlink()
    file.mkdir(mode=0o700)
    refused("may name a Ray cluster, but cannot be read: Is a directory")


def test_a_link_is_refused(root, our_port, tmp_path):
    file = record(root / "ray", our_port)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused("is a link")


def test_a_link_in_place_of_the_folder_is_refused(root, our_port, tmp_path):
    record(tmp_path / "elsewhere", our_port)
    (root / "ray").symlink_to(tmp_path / "elsewhere")
    refused("is a link")


def test_a_record_that_others_may_write_to_is_refused(root, our_port):
    record(root / "ray", our_port).chmod(0o664)
    refused("others may write to it (mode 664)")


def test_a_temporary_folder_without_the_sticky_bit_is_refused(root, our_port):
    record(root / "ray", our_port)
    root.chmod(0o777)
    refused("no sticky bit")


def test_an_address_that_was_given_is_not_asked_about(root, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert running_cluster() == "10.0.0.9:6379"


@needs_root
def test_auto_is_the_recorded_cluster_or_an_error_with_the_reason(root, our_port, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(PlacementError, match="no `ray start` of ours"):
        running_cluster()
    file = record(root / "ray", our_port)
    assert running_cluster() == f"127.0.0.1:{our_port}"
    os.chown(file, UID, UID)
    with pytest.raises(PlacementError, match=f"belongs to user {UID}"):
        running_cluster()


def test_the_folder_of_our_ray_is_closed_to_others(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own are too long for sockets
        monkeypatch.setenv("RAY_TMPDIR", short)
        folder = Path(private_folder())
        assert str(folder.parent) == short and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_too_deep_for_sockets_is_not_taken(root, monkeypatch):
    deep = root / ("x" * 60)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    folder = Path(private_folder())
    folder.rmdir()
    assert str(folder.parent) == "/tmp"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_token_is_ours_alone_whatever_the_umask(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(umask)
    try:
        ensure_token()
    finally:
        os.umask(before)
    token = tmp_path / ".ray" / "auth_token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token.parent, token)] == [0o700, 0o600]
    text = token.read_text()
    assert len(bytes.fromhex(text)) == 32
    token.chmod(0o644)
    token.parent.chmod(0o755)
    ensure_token()  # as an earlier Ray left it
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token.parent, token)] == [
        0o700,
        0o600,
    ] and token.read_text() == text


def test_a_token_is_whole_when_it_appears(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for home in (tmp_path / str(number) for number in range(200)):
            monkeypatch.setenv("HOME", str(home))
            together = threading.Barrier(8)

            def token(token=home / ".ray" / "auth_token", together=together) -> str:
                together.wait()
                ensure_token()
                return token.read_text()

            tokens = {future.result() for future in [threads.submit(token) for _ in range(8)]}
            assert [len(text) for text in tokens] == [64]
            assert [path.name for path in (home / ".ray").iterdir()] == ["auth_token"]


def test_no_token_is_made_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ensure_token()
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_another_users_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    ensure_token()
    os.chown(tmp_path / ".ray" / "auth_token", UID, UID)
    with pytest.raises(PlacementError, match=f"belongs to user {UID}"):
        ensure_token()
