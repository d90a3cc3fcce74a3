"""What is counted of an app's work: for Prometheus, and the losses that the page draws."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slime_like.records import PassResult
from slime_like.tinker.records import Call, CallFailure, CallResult, Kind
from slime_like.tinker.store import listings
from slime_like.tinker.store.rows import Rows

_MAX_REQUESTS = 65536
_MAX_MODELS = 1024
_MAX_LOSSES = 512
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60)


class Observed:
    """Counters of one app, in a registry of their own. No tenant is named."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = Histogram(
            "tinker_http_seconds",
            "HTTP requests, by route and status; retrieve_future waits for answers",
            ("route", "status"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._under_way = Gauge("tinker_http_under_way", "HTTP requests being answered", registry=self._registry)
        self._calls = Counter("tinker_calls", "Calls that were taken", ("kind",), registry=self._registry)
        self._rows = Counter("tinker_rows", "Datums of passes that were taken", ("kind",), registry=self._registry)
        self._answers = Counter(
            "tinker_answers", "Answers that clients fetched", ("kind", "outcome"), registry=self._registry
        )
        self._requests = Gauge(
            "tinker_requests", "Requests in the database", ("kind", "state"), registry=self._registry
        )
        self._things = Gauge("tinker_things", "What there is in the database", ("what",), registry=self._registry)
        self._execution = Gauge(
            "tinker_execution",
            "What the service has executed since its start, and has under way",
            ("what",),
            registry=self._registry,
        )
        self._busy = Gauge(
            "tinker_execution_seconds",
            "Seconds that calls of a kind took, since the start",
            ("kind",),
            registry=self._registry,
        )
        self._models: OrderedDict[str, str] = OrderedDict()  # request id -> model id
        self._losses: OrderedDict[str, deque[tuple[float, float]]] = OrderedDict()

    def begin_http(self) -> None:
        """A request has come."""
        self._under_way.inc()

    def end_http(self, route: str, status: int, seconds: float) -> None:
        """It was answered; route: its pattern, not its path, which has ids in it."""
        self._under_way.dec()
        self._http.labels(route, str(status)).observe(seconds)

    def taken(self, request_id: str, call: Call) -> None:
        """A call has an id."""
        self._calls.labels(call.kind).inc()
        if call.rows:
            self._rows.labels(call.kind).inc(len(call.rows))
        if call.kind == Kind.FORWARD_BACKWARD and call.model_id is not None:
            self._models[request_id] = call.model_id
            while len(self._models) > _MAX_REQUESTS:
                self._models.popitem(last=False)

    def answered(self, request_id: str, answer: CallResult | CallFailure) -> None:
        """A client has fetched what became of it."""
        outcome = "done" if isinstance(answer, CallResult) else answer.category
        self._answers.labels(answer.kind, outcome).inc()
        model_id = self._models.pop(request_id, None)
        if model_id is None or not isinstance(answer, CallResult) or not isinstance(answer.result, PassResult):
            return
        losses = self._losses.setdefault(model_id, deque(maxlen=_MAX_LOSSES))
        losses.append((time.time(), answer.result.metrics.get("loss", float("nan"))))
        self._losses.move_to_end(model_id)
        while len(self._losses) > _MAX_MODELS:
            self._losses.popitem(last=False)

    def losses(self, model_id: str) -> list[tuple[float, float]]:
        """(time, summed loss) of a model's latest passes whose answers were fetched since the server started."""
        return list(self._losses.get(model_id, ()))

    async def exposition(self, rows: Rows, stats: Mapping[str, Any]) -> bytes:
        """The metrics in Prometheus' text format, with the database's and the service's as they are now."""
        for name, value in stats.items():
            if name == "seconds":
                for kind, seconds in value.items():
                    self._busy.labels(kind).set(seconds)
            elif name == "ended":
                for what, number in value.items():
                    self._execution.labels(f"ended {what}").set(number)
            else:  # of each tenant: their sum, since no tenant is named
                self._execution.labels(name).set(sum(value.values()) if isinstance(value, Mapping) else value)
        self._requests.clear()
        for (kind, state), number in (await listings.queue_lengths(rows)).items():
            self._requests.labels(kind, state).set(number)
        for what, number in (await listings.live_counts(rows)).items():
            self._things.labels(what).set(number)
        return generate_latest(self._registry)
