"""Runs inside the engine: one request during which weights come in from all trainer sources and are loaded, until every
source has ended.

Each source has a channel of its own: a socket through which it tells where a bucket lies (this file), or a process
group over which the bucket comes (groups.py). A bucket may come with a list of what to digest once it is loaded
(receipt.py); at its end the source hears one digest of all of these.

Through a socket, a line of JSON each:
    {"load": [path, start of the table, its end], "digest": entries}         in a file in shared memory (shm_slots.py)
    {"slot": number, "table": rows, "stop": bytes, "digest": entries}        on this rank's own GPU, in one of the
        source's memories; with "handle" (devices.py) when the slot has another memory than before
    {"end": true}                                                            all was sent

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
from typing import Any

from slime_like.weight_sync.in_engine import shm_slots
from slime_like.weight_sync.in_engine.devices import open_handle, settle
from slime_like.weight_sync.in_engine.groups import take_groups
from slime_like.weight_sync.in_engine.receipt import digest_of_entries, held_by, read_digests

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
        self._digests: dict[str, list] = {}  # of a channel, in the order in which they were asked for

    def load(self, channel: str, tensors: Iterator[tuple], entries: Sequence[list]) -> None:
        """One bucket; its memory may be written to again once the device has done what it was told here."""
        self.model.load_weights(tensors)
        if entries:
            if self._held is None:
                self._held = held_by(self.model)
            self._digests.setdefault(channel, []).extend(digest_of_entries(self._held, entries))

    def digest(self, channel: str) -> str:
        """16 hex digits. The only moment at which the host reads digests from the device."""
        joined = new_hash()
        for one in read_digests(self._digests.get(channel, [])):
            joined.update(one)
        return joined.hexdigest()


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
    if "end" in message:
        line.forget_memories()  # the trainer's: it gets them back before it hears of us
        line.say({"digest": loading.digest(line.path)})
        return True
    if "slot" in message:
        memory = line.memory(message)
        loading.load(line.path, shm_slots.views(memory, message["table"], message["stop"]), message["digest"])
        settle(memory.device)  # before the memory is written to again
    else:
        path, start, stop = message["load"]
        with shm_slots.tensors(path, start, stop, directory) as tensors:
            loading.load(line.path, tensors, message["digest"])
    line.say({"loaded": True})
    return False


class _Line:
    """A connection to a source on which each message is a line of JSON."""

    def __init__(self, path: str, timeout_s: float):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        self._file = self.socket.makefile("rb")
        self._memories: dict[int, Any] = {}

    def __enter__(self) -> _Line:
        self.socket.connect(self.path)
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self.socket.close()
        self.forget_memories()

    def memory(self, message: dict) -> Any:
        """The source's own memory in which a bucket lies. A handle comes with it whenever it is another one."""
        if "handle" in message:
            self._memories.pop(message["slot"], None)  # given back before the next one is opened
            self._memories[message["slot"]] = open_handle(message["handle"])
        return self._memories[message["slot"]]

    def forget_memories(self) -> None:
        """Let go of the source's memory."""
        self._memories.clear()

    def say(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict:
        line = self._file.readline(_MOST)
        if not line.endswith(b"\n"):
            raise ConnectionError(f"the source at {self.path} went away before its end")
        return json.loads(line)
