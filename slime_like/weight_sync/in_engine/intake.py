"""Runs inside the engine: one request during which weights come in from all trainer sources and are loaded, until every
source has ended.

Each source has a channel of its own: a socket beside the shared memory through which it tells where in which file a
bucket lies (this file), or a process group over which the bucket comes (groups.py). A bucket may come with a list of
what to digest once it is loaded (receipt.py); at its end the source hears one digest of all of these.

Nothing is raised: an exception in a custom loader ends SGLang's scheduler (0.5.23). The sources are told instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import selectors
import socket
import stat
from collections.abc import Iterator, Sequence

from slime_like.weight_sync.in_engine import shm_slots
from slime_like.weight_sync.in_engine.groups import take_groups
from slime_like.weight_sync.in_engine.receipt import digest_of_entries, held_by

logger = logging.getLogger(__name__)

#: Name of the one "tensor" of the request.
INTAKE_NAME = "__stream__"
#: Bytes of one line, at most.
_MOST = 1 << 26


def take(model, request: bytes, directory: str | None) -> None:
    """Load everything. request: JSON {"kind": "socket" or "group", "channels": [path of the socket or name of the
    group, …], "engine": its index, "rank", "layout": which of the lists of digests is for this engine (groups),
    "timeout_s": the longest wait for a bucket}.
    """
    order = json.loads(request)
    loading = Loading(model)
    try:
        if order["kind"] == "group":
            take_groups(loading, order)
        else:
            _take_sockets(loading, order, directory)
    except Exception:
        logger.exception("weights were not taken in")


def new_hash() -> hashlib.blake2b:
    """What joins the digests of one channel; in the standard library, which every engine has."""
    return hashlib.blake2b(digest_size=8)


class Loading:
    """The model's own loader, and for each channel one digest of all that was to be digested."""

    def __init__(self, model):
        self.model = model
        self._held: dict | None = None
        self._hashes: dict[str, hashlib.blake2b] = {}

    def load(self, channel: str, tensors: Iterator[tuple], entries: Sequence[list]) -> None:
        """One bucket; its memory may be written to again afterwards."""
        self.model.load_weights(tensors)
        if entries:
            if self._held is None:
                self._held = held_by(self.model)
            self._hash(channel).update(digest_of_entries(self._held, entries))

    def digest(self, channel: str) -> str:
        """16 hex digits."""
        return self._hash(channel).hexdigest()

    def _hash(self, channel: str) -> hashlib.blake2b:
        return self._hashes.setdefault(channel, new_hash())


def _take_sockets(loading: Loading, order: dict, directory: str | None) -> None:
    lines: list[_Line] = []  # of sources that have not ended
    with contextlib.ExitStack() as stack:
        try:
            for path in order["channels"]:
                lines.append(
                    stack.enter_context(
                        _Line(shm_slots.checked_path(path, directory, stat.S_ISSOCK), order["timeout_s"])
                    )
                )
                lines[-1].say({"engine": order["engine"], "rank": order["rank"]})
            selector = stack.enter_context(selectors.DefaultSelector())
            for line in lines:
                selector.register(line.socket, selectors.EVENT_READ, line)
            while lines:
                ready = selector.select(order["timeout_s"])
                if not ready:
                    raise TimeoutError(f"no weights came for {order['timeout_s']} s")
                for key, _ in ready:
                    if _next_bucket(loading, key.data, directory):
                        selector.unregister(key.fileobj)
                        lines.remove(key.data)
        except Exception as error:
            if not lines:
                raise
            for line in lines:
                with contextlib.suppress(OSError):
                    line.say({"error": f"{type(error).__name__}: {error}"})


def _next_bucket(loading: Loading, line: _Line, directory: str | None) -> bool:
    """Load one source's next bucket; True if the source has ended instead."""
    message = line.hear()
    if "load" not in message:
        line.say({"digest": loading.digest(line.path)})
        return True
    path, start, stop = message["load"]
    loading.load(line.path, shm_slots.tensors(shm_slots.checked_path(path, directory), start, stop), message["digest"])
    line.say({"loaded": stop})
    return False


class _Line:
    """A connection to a source on which each message is a line of JSON."""

    def __init__(self, path: str, timeout_s: float):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> _Line:
        self.socket.connect(self.path)
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self.socket.close()

    def say(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict:
        line = self._file.readline(_MOST)
        if not line.endswith(b"\n"):
            raise ConnectionError(f"the source at {self.path} went away before its end")
        return json.loads(line)
