"""Which traces of Ray on this host are believed, and where a Ray of ours keeps its own: closed to other users of the
host.

A cluster's head runs code in whoever joins it (errors travel as pickles), and sockets in its folder lead to its
processes. Ray itself makes that folder, /tmp/ray, writable for everyone whatever the umask (2.60:
try_make_directory_shared), and reads from it whom to join.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from slime_like.errors import PlacementError
from slime_like.utils.net import is_own_address, listener_uids

logger = logging.getLogger(__name__)

#: A path of an AF_UNIX socket has at most 107 bytes. Ray's longest below its folder:
#: /session_<date>_<pid>/sockets/plasma_store.
_MOST_PATH_BYTES = 107
_SOCKET_BYTES = len("/session_2026-11-22_01-03-04_123456_4194304/sockets/plasma_store")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What files of Ray's on this host say of a running cluster: its address, or why the one that they name is not
    believed.
    """

    address: str | None = None
    refused: str | None = None


def temporary_root() -> str:
    """Where Ray makes its folder: RAY_TMPDIR, TMPDIR or /tmp, as Ray chooses."""
    return os.path.abspath(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def lasting_folder() -> str:
    """Where the run scripts' `ray start` keeps its files, in a folder that only we can enter: scripts/lib/run_common.sh
    says the same.
    """
    return os.path.join(os.path.abspath(os.environ.get("RAY_TMPDIR") or "/tmp"), f"slime_like-{os.geteuid()}")


def recorded_cluster() -> Recorded:
    """The cluster that `ray start` wrote down, if it runs and its record is ours."""
    outcome = Recorded()
    for root, folder in ((os.path.dirname(lasting_folder()), lasting_folder()), (temporary_root(), temporary_root())):
        record = os.path.join(folder, "ray", "ray_current_cluster")
        if os.path.lexists(record):
            try:
                read = _read_record(record, root)
            except OSError as error:  # root's alone to read, or just removed
                read = Recorded(refused=f"{record} may name a Ray cluster, but cannot be read: {error.strerror}")
            if read.address is not None:
                return read
            outcome = read if read.refused else outcome
    return outcome


def _read_record(record: str, root: str) -> Recorded:
    """Believe a record that only we or root can have written.

    In a folder that others may write to, only if the listener is ours besides.
    """
    doubt = _owned_by_another(record, root)
    if doubt is not None:
        return Recorded(refused=f"{record} names a Ray cluster, but {doubt}")
    with open(record, encoding="utf-8", errors="replace") as file:
        address = file.read(300).strip()
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not _answers(host.strip("[]"), int(port)):
        return Recorded()
    if not is_own_address(host.strip("[]")):
        writable = _writable_by_others(os.path.dirname(record), root)
        return (
            Recorded(address)
            if writable is None
            else Recorded(refused=f"{record} names a Ray cluster at {address}, but others may write to {writable}")
        )
    uids = listener_uids(int(port))
    strangers = sorted((uids or set()) - {os.geteuid(), 0})
    if not uids or strangers:
        who = f"user {strangers[0]} listens there" if strangers else "it is not to be seen who listens there"
        return Recorded(refused=f"{record} names a Ray cluster at {address}, but {who}")
    return Recorded(address)


def _owned_by_another(record: str, root: str) -> str | None:
    """Why a record may be another user's: its owner, its mode, a link, or a folder between it and the root that is
    another's; None if it is not.
    """
    for path in _up_to(record, root):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or not (
            stat.S_ISDIR(status.st_mode) or path == record and stat.S_ISREG(status.st_mode)
        ):
            return f"{path} is a link or no plain file"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        if path == record and status.st_mode & 0o022:
            return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return _open_root(root)


def _open_root(root: str) -> str | None:
    """Why others may rename what lies in a temporary folder; None if they may not."""
    status = os.stat(root)
    if status.st_uid not in (os.geteuid(), 0):
        return f"{root} belongs to user {status.st_uid}"
    return (
        f"others may rename what is in {root} (no sticky bit)"
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        else None
    )


def _writable_by_others(folder: str, root: str) -> str | None:
    return next((path for path in _up_to(folder, root) if os.lstat(path).st_mode & 0o022), None)


def _up_to(path: str, root: str) -> list[str]:
    """The path and the folders above it, below the root."""
    paths = []
    while path != root and path != os.path.dirname(path):
        paths.append(path)
        path = os.path.dirname(path)
    return paths


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True


def private_folder() -> str:
    """A new folder that only we can enter, for the files and sockets of a Ray of this run; short enough for its
    sockets.

    In RAY_TMPDIR, TMPDIR or /tmp. Ray opens its own folder to everyone, so that one is `<this>/r`.
    """
    reasons: list[str] = []
    for root in dict.fromkeys((temporary_root(), "/tmp")):
        too_long = len(os.fsencode(f"{root}/slr-12345678/r")) + _SOCKET_BYTES > _MOST_PATH_BYTES
        reason = (
            "the path is too long for sockets below it"
            if too_long
            else None
            if os.access(root, os.W_OK | os.X_OK)
            else "not writable"
        )
        reason = reason or _open_root(root)
        if reason is None:
            for earlier in reasons:
                logger.warning("Ray's files go to %s, not to %s", root, earlier)
            return tempfile.mkdtemp(prefix="slr-", dir=root)
        reasons.append(f"{root}: {reason}")
    fix = (
        "set RAY_TMPDIR to a folder of yours with a path of at most"
        f" {_MOST_PATH_BYTES - _SOCKET_BYTES - len('/slr-12345678/r')} bytes"
    )
    raise PlacementError(f"no folder for Ray's files and sockets: {'; '.join(reasons)}.\n  Fix: {fix}.")


def ensure_token() -> None:
    """A Ray token in ~/.ray/auth_token that only we can read, made if there is none; Ray's own would have the umask's
    mode.

    Nothing to do where RAY_AUTH_MODE says `disabled`, or RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH give the token. Raises
    PlacementError for another user's.
    """
    if (
        os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
        or os.environ.get("RAY_AUTH_TOKEN")
        or os.environ.get("RAY_AUTH_TOKEN_PATH")
    ):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # Whole when it appears: a Ray that starts beside this one must not read half of it.
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.remove(draft)
    for private, mode in ((path.parent, 0o700), (path, 0o600)):
        status = private.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise PlacementError(
                f"{private}, which holds the key of our Ray clusters, belongs to user {status.st_uid}.\n  Fix: remove"
                " it, or set RAY_AUTH_TOKEN_PATH."
            )
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            private.chmod(mode)
            if private == path:
                logger.warning(
                    "%s was open to other users (mode %o), now it is not. Delete it when no Ray runs, and a new one is"
                    " made.",
                    path,
                    status.st_mode & 0o777,
                )
