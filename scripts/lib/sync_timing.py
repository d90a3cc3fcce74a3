"""One weight sync, taken apart: how long each phase took, and how much of it was spent in the source, in hashing, in
copying and in the engine.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

from slime_like.sglang_backend.bodies import Body
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER
from slime_like.weight_sync.buckets import Digest, NamedTensor, Proof, PublisherOptions, SentReport, buckets, num_bytes
from slime_like.weight_sync.in_engine.receipt import RECEIPT_NAME
from slime_like.weight_sync.proof.receipt import Receipt, loader_request
from slime_like.weight_sync.session import EngineSide
from slime_like.weight_sync.transports.slots import BucketSlot


@dataclass(frozen=True)
class SyncTimes:
    """Seconds.

    The first five follow each other and add up to the sync; the next five lie inside send and load, and may overlap.
    """

    begin_s: float  # pause, flush, open
    send_s: float  # the publisher's send()
    load_s: float  # loading from disk; nothing with the other transports
    verify_s: float  # the engines' digests compared
    finish_s: float  # close, flush, name the version, read it back, continue
    source_s: float  # waiting for the next tensor of the source: gathering and converting
    hash_s: float  # the trainer's digest of all that it sends
    copy_s: float  # putting tensors into buckets
    receipt_s: float  # the receipt's digests of what it sends
    engine_s: float  # an engine busy with a request that brings it weights
    requests: float  # HTTP requests of the whole sync
    http_bytes: float  # their bodies

    @property
    def total_s(self) -> float:
        """The whole sync."""
        return self.begin_s + self.send_s + self.load_s + self.verify_s + self.finish_s

    @property
    def transfer_s(self) -> float:
        """From the first tensor to the last one loaded: what a transport's bound is compared with."""
        return self.send_s + self.load_s


def medians(times: Sequence[SyncTimes]) -> SyncTimes:
    """Each part's median."""
    return SyncTimes(
        **{field.name: statistics.median(getattr(one, field.name) for one in times) for field in fields(SyncTimes)}
    )


class Recorder:
    """Spans of time by kind, from whatever thread; where spans of one kind overlap, the time counts once."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self.requests = self.http_bytes = 0

    def add(self, kind: str, started: float, ended: float) -> None:
        """Note one span."""
        self._spans.setdefault(kind, []).append((started, ended))

    def seconds(self, kind: str) -> float:
        """The length of all of its spans together."""
        total, reached = 0.0, float("-inf")
        for started, ended in sorted(self._spans.get(kind, ())):
            total += max(0.0, ended - max(started, reached))
            reached = max(reached, ended)
        return total

    def timed(self, tensors: Iterable[NamedTensor], kind: str) -> Iterator[NamedTensor]:
        """The same tensors; the time until each comes is of that kind."""
        iterator = iter(tensors)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.add(kind, started, time.perf_counter())
            yield item

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record every engine request that brings weights ("engine"), all requests' bodies, the publishers' hashing
        ("hash"), their copying into buckets ("copy"), and what a receipt takes in ("receipt", the source's own time
        included).

        Publishers make clients and digests of their own, so the classes are watched, not the objects.
        """
        request, take_in = EngineClient._request, Receipt.watching

        def watched_request(
            client: EngineClient,
            method: str,
            path: str,
            body: dict | Body | None = None,
            timeout_s: float | None = None,
        ) -> Any:
            started = time.perf_counter()
            answer = request(client, method, path, body, timeout_s)
            if path.startswith("/update_weights_from"):
                self.add("engine", started, time.perf_counter())
            self.requests += 1
            self.http_bytes += _body_bytes(body)
            return answer

        def watched(function: Callable, kind: str) -> Callable:
            def timed(*args: Any, **more: Any) -> Any:
                started = time.perf_counter()
                try:
                    return function(*args, **more)
                finally:
                    self.add(kind, started, time.perf_counter())

            return timed

        def watched_watching(receipt: Receipt, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
            return self.timed(take_in(receipt, tensors), "receipt")

        with (
            mock.patch.object(EngineClient, "_request", watched_request),
            mock.patch.object(Digest, "add", watched(Digest.add, "hash")),
            mock.patch.object(BucketSlot, "put", watched(BucketSlot.put, "copy")),
            mock.patch.object(Receipt, "watching", watched_watching),
        ):
            yield


def timed_sync(engines: EngineSide, send: Callable[[Recorder], None], verify: Callable[[], None] | None) -> SyncTimes:
    """One whole sync, as session.run_session orders it.

    send: gives every tensor to a publisher, its source wrapped in `recorder.timed(…, "source")`.
    """
    recorder = Recorder()
    marks = [time.perf_counter()]
    with recorder.watching():
        engines.begin()
        marks.append(time.perf_counter())
        send(recorder)
        marks.append(time.perf_counter())
        engines.load()
        marks.append(time.perf_counter())
        inside = {kind: recorder.seconds(kind) for kind in ("source", "hash", "copy", "receipt", "engine")}
        if verify is not None:
            engines.open()
            verify()
        marks.append(time.perf_counter())
        engines.finish()
        marks.append(time.perf_counter())
    begin, sending, load, verifying, finish = (after - before for before, after in zip(marks, marks[1:], strict=False))
    counts = {"requests": float(recorder.requests), "http_bytes": float(recorder.http_bytes)}
    inside |= {"receipt": max(0.0, inside["receipt"] - inside["source"])}
    return SyncTimes(
        begin, sending, load, verifying, finish, **{f"{kind}_s": seconds for kind, seconds in inside.items()}, **counts
    )


def empty_request_s(client: EngineClient, repeats: int = 10) -> float:
    """Median seconds of a request to the engine's loader that brings nothing: what each bucket costs before its first
    byte.
    """
    nothing = loader_request(RECEIPT_NAME, [b"[]"] * client.endpoint.tp_size)
    seconds = []
    client.begin_weight_update()  # SGLang takes no request of a loader outside of a session
    try:
        for _ in range(repeats):
            started = time.perf_counter()
            client.update_weights_from_tensor(nothing, load_format=WEIGHT_LOADER)
            seconds.append(time.perf_counter() - started)
    finally:
        client.end_weight_update()
    return statistics.median(seconds)


class InlinePublisher:
    """The plain way, for comparison: pickled tensors as base64 inside the request, once for each tensor parallel rank
    of the engine.
    """

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]

    def connect(self) -> None:
        """Nothing to do."""

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Bucket by bucket."""
        count = size = 0
        for bucket in buckets(tensors, self._options.buffer_bytes):
            text = base64.b64encode(
                pickle.dumps([(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket])
            ).decode()
            for client in self._clients:
                client.update_weights_from_tensor([text] * client.endpoint.tp_size, load_format=None)
            count, size = count + len(bucket), size + sum(num_bytes(tensor) for _, tensor in bucket)
        return SentReport(count, size)

    def finish(self, version: int) -> None:
        """Nothing to do."""

    def abandon(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is held."""


def _body_bytes(value: Any) -> int:
    """Bytes of a request's JSON, without making a text of its long strings, which are base64; none without a body."""
    if value is None:
        return 0
    if isinstance(value, Body):
        return len(value)
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, dict):
        return 2 + sum(len(key) + 6 + _body_bytes(item) for key, item in value.items())
    if isinstance(value, list):
        return 2 + sum(_body_bytes(item) + 2 for item in value)
    return len(json.dumps(value))
