"""`ReceiverClient`: what trainer and driver say to one receiver (receiver.py), and `start_receiver`, which runs one as
a guarded child. No torch.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import requests

from slime_like.errors import WaitTimeout, WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.utils.files import PACKAGE_ROOT
from slime_like.utils.guard import GuardedProcess, start_guarded
from slime_like.utils.net import certificates, free_port, http_url

_CONNECT_TIMEOUT_S = 10.0
_LOG_LINES = 20
#: Statuses of refusals after which sending the whole shard instead is worth a try: not in step, damaged.
_MENDABLE = (409, 422)


class ReceiverError(WeightSyncError):
    """A receiver refused something or does not answer (status None)."""

    def __init__(self, message: str, status: int | None = None):
        self.message, self.status = message, status
        super().__init__(message)

    def __reduce__(self):
        return (ReceiverError, (self.message, self.status))

    @property
    def mendable(self) -> bool:
        """Whether the same shard, sent whole, may be taken."""
        return self.status in _MENDABLE


@dataclasses.dataclass(frozen=True)
class HeldVersion:
    """What a receiver has. version, folder: None if nothing; sources: digest of each trainer source's share."""

    version: int | None
    folder: str | None
    sources: dict[int, str]


class ReceiverClient:
    """One receiver's requests. Every method raises ReceiverError naming it, request and status, or WaitTimeout.

    Threads may share one.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float):
        self.url, self._key, self._timeout_s = url.rstrip("/"), key, timeout_s
        self._local = threading.local()

    @property
    def name(self) -> str:
        """For messages."""
        return f"receiver at {self.url}"

    def state(self) -> HeldVersion:
        """What it holds."""
        answer = self._request("GET", "/state")
        return HeldVersion(
            answer["version"], answer["folder"], {int(source): value for source, value in answer["sources"].items()}
        )

    def begin(self, version: int) -> None:
        """Get it ready for a version; what was sent before and not committed is forgotten."""
        self._request("POST", "/begin", {"version": version})

    def send_shard(self, frame: bytes | bytearray) -> None:
        """One shard's frame."""
        self._request("POST", "/shard", frame)

    def finish(self, version: int, source: int, *, num_sources: int, num_shards: int, digest: str) -> None:
        """This source has sent all."""
        body = {
            "version": version,
            "source": source,
            "num_sources": num_sources,
            "num_shards": num_shards,
            "digest": digest,
        }
        self._request("POST", "/finish", body)

    def commit(self, version: int) -> None:
        """Make it the version that counts."""
        self._request("POST", "/commit", {"version": version})

    def folder_of(self, version: int) -> str:
        """The folder to load, on the receiver's host. Raises ReceiverError if it holds another version."""
        held = self.state()
        if held.version != version or held.folder is None:
            raise ReceiverError(f"{self.name} holds version {held.version}, it must hold {version}")
        return held.folder

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            session = requests.Session()
            session.trust_env = False  # no proxies: a receiver is always reached directly
            session.verify = certificates() or True
            session.headers["Authorization"] = f"Bearer {self._key or ''}"
            self._local.session = session
        return self._local.session

    def _request(self, method: str, path: str, body: dict | bytes | bytearray | None = None) -> Any:
        what, started = f"{self.name}: {method} {path}", time.monotonic()
        content = {"json": body} if isinstance(body, dict) else {"data": body}
        try:
            response = self._session().request(
                method, self.url + path, timeout=(min(_CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s), **content
            )
        except requests.Timeout as error:
            seconds = time.monotonic() - started
            raise WaitTimeout(
                who="trainer", whom=self.name, phase=f"{method} {path}", seconds=seconds, last=type(error).__name__
            ) from error
        except requests.RequestException as error:
            raise ReceiverError(f"{what} failed: {error}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200 or not isinstance(answer, dict):
            reason = answer.get("error") if isinstance(answer, dict) else response.text[:500]
            raise ReceiverError(f"{what} was refused ({response.status_code}): {reason}", response.status_code)
        return answer


def receivers_of(endpoints: Sequence[EngineEndpoint], timeout_s: float) -> dict[ReceiverClient, list[int]]:
    """Each receiver once, with the engines that load from it. Raises WeightSyncError for an engine that has none."""
    by_url: dict[str, ReceiverClient] = {}
    engines_of: dict[ReceiverClient, list[int]] = {}
    for endpoint in endpoints:
        if endpoint.receiver_url is None:
            raise WeightSyncError(
                f"engine {endpoint.index} at {endpoint.url} has no receiver beside it. Fix:"
                " --rollout-external-receiver-addrs."
            )
        if endpoint.receiver_url not in by_url:
            by_url[endpoint.receiver_url] = ReceiverClient(endpoint.receiver_url, endpoint.receiver_key, timeout_s)
        engines_of.setdefault(by_url[endpoint.receiver_url], []).append(endpoint.index)
    return engines_of


class RunningReceiver:
    """A receiver that we started; it dies with this process."""

    def __init__(self, url: str, key: str, process: GuardedProcess, private_dir: str):
        self.url, self.key, self.pid = url, key, process.pid
        self._process, self._private_dir = process, private_dir

    def check(self) -> None:
        """Raise ReceiverError with the tail of its log if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ReceiverError(
                f"receiver at {self.url} ended with status {code}. End of"
                f" {self._process.log_path}:\n{self._process.log_tail(_LOG_LINES)}"
            )

    def close(self) -> None:
        """End it. Harmless when called twice."""
        self._process.close(grace_s=1.0)
        shutil.rmtree(self._private_dir, ignore_errors=True)

    def wait_ready(self, timeout_s: float) -> None:
        """Until it answers with our key. Raises ReceiverError the moment it ends, WaitTimeout at the deadline."""
        client, deadline = ReceiverClient(self.url, self.key, timeout_s=5.0), time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                client.state()
                return
            except (ReceiverError, WaitTimeout) as error:
                if isinstance(error, ReceiverError) and error.status is not None:
                    raise
                if time.monotonic() > deadline:
                    tail = self._process.log_tail(_LOG_LINES)
                    raise WaitTimeout(
                        who="launcher",
                        whom=f"the receiver at {self.url}",
                        phase="start",
                        seconds=timeout_s,
                        last=f"\n{tail}",
                    ) from None
            time.sleep(0.05)


def start_receiver(
    directory: str, *, host: str = "127.0.0.1", log_path: str, timeout_s: float, log_level: str = "info"
) -> RunningReceiver:
    """Start a receiver for `directory` on this host, with a key that we make up, and wait until it answers."""
    port, key = free_port(host), secrets.token_hex(24)
    private_dir = tempfile.mkdtemp(prefix="slime-like-receiver-")
    key_path = os.path.join(private_dir, "key")
    try:
        with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
        argv = [
            sys.executable,
            "-m",
            "slime_like.weight_sync.delta.receiver",
            "--directory",
            directory,
            "--host",
            host,
            "--port",
            str(port),
        ]
        argv += ["--log-level", log_level]
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([PACKAGE_ROOT, *filter(None, [environment.get("PYTHONPATH")])])
        process = start_guarded([*argv, "--api-key-file", key_path], env=environment, log_path=log_path, secrets=(key,))
    except BaseException:
        shutil.rmtree(private_dir, ignore_errors=True)
        raise
    running = RunningReceiver(http_url(host, port), key, process, private_dir)
    try:
        running.wait_ready(timeout_s)
    except BaseException:
        running.close()
        raise
    return running
