"""A PostgreSQL of our own: Debian's packages, a cluster in a folder, on a unix socket, as a user without rights."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.utils.net import free_port


def _programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if folders:
        return folders[-1]
    on_path = shutil.which("pg_ctl")
    return None if on_path is None else Path(on_path).resolve().parent


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a new, empty database; the server is stopped and its folder removed afterwards."""
    programs = _programs()
    if programs is None or not (programs / "initdb").exists():
        pytest.skip("no PostgreSQL server is installed (apt-get install postgresql)")
    account = None
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        account = next((name for name in ("postgres", "nobody") if _exists(name)), None)
        if account is None:
            pytest.skip("no account without rights to run PostgreSQL as")
    # Short, as a socket's path may have 107 bytes; not below pytest's folder, which only its owner may enter.
    folder = tempfile.mkdtemp(prefix="pg-")
    try:
        if account is not None:
            shutil.chown(folder, account)
        data, port = f"{folder}/data", free_port()

        def run(*command: str) -> None:
            subprocess.run(command, user=account, cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)

        run(str(programs / "initdb"), "-D", data, "-U", "server", "-A", "trust", "--no-sync")
        options = f"-c listen_addresses= -k {folder} -p {port}"
        control = (str(programs / "pg_ctl"), "-D", data, "-w")
        run(*control, "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield f"postgresql://server@/postgres?host={folder}&port={port}"
        finally:
            run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
