"""Whether a server that we started still works, though its process lives: asked again and again, in a thread of its
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slime_like.errors import RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.sglang_backend.external_server import answers

#: How many questions in a row must have been missed, however long the silence: it may be we who were stopped.
_MISSES = 3
#: Longest pause between two questions, and longest wait for the last one before the judgment, in seconds.
_PAUSE_S, _LAST_QUESTION_S = 5.0, 10.0


class HangWatch:
    """Judges by silence: a server hangs that has answered nothing for `timeout_s` seconds, has missed at least three
    questions meanwhile, and does not answer one more.

    ask: one question with a deadline in seconds; raises RunError where no answer comes.
    """

    def __init__(self, ask: Callable[[float], object], *, timeout_s: float, name: str):
        self._ask, self._timeout_s = ask, timeout_s
        # A quarter: a busy server answers a question that has waited long, and questions do not pile up.
        self._question_s = timeout_s / 4
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._last_answer, self._missed = time.monotonic(), 0
        threading.Thread(target=self._watch, name=f"hang watch of {name}", daemon=True).start()

    def silent_s(self) -> float | None:
        """For how long it has been silent, if it hangs; else None. Takes up to 10 s where it seems to."""
        with self._lock:
            silence, missed = time.monotonic() - self._last_answer, self._missed
        if missed < _MISSES or silence < self._timeout_s:
            return None
        # What kept it busy may be over since the thread's last question.
        return None if self._question(min(self._question_s, _LAST_QUESTION_S)) else silence

    def stop(self) -> None:
        """End the watch; a question that is under way ends by its own deadline. Harmless when called twice."""
        self._stopped.set()

    def _question(self, seconds: float) -> bool:
        try:
            self._ask(seconds)
        except RunError:
            with self._lock:
                self._missed += 1
            return False
        with self._lock:
            self._last_answer, self._missed = time.monotonic(), 0
        return True

    def _watch(self) -> None:
        pause_s, took = min(_PAUSE_S, self._question_s), 0.0
        while not self._stopped.wait(max(0.0, pause_s - took)):
            started = time.monotonic()
            self._question(self._question_s)
            took = time.monotonic() - started


class EngineHangWatch:
    """Over one engine of ours, asked by way of its scheduler."""

    def __init__(self, endpoint: EngineEndpoint, timeout_s: float):
        self._endpoint = endpoint
        self._client = EngineClient(endpoint)
        self._watch = HangWatch(self._ask, timeout_s=timeout_s, name=endpoint.url)

    def judgment(self) -> str | None:
        """What to say of an engine that hangs; None of one that does not."""
        silence = self._watch.silent_s()
        if silence is None:
            return None
        who = "its scheduler, though its HTTP server answers" if answers(self._endpoint) else "its HTTP server"
        return (
            f"engine {self._endpoint.index} at {self._endpoint.url} hangs: no answer to /server_info for {silence:.0f}"
            f" s (--engine-hang-timeout-s) from {who}; it is ended"
        )

    def stop(self) -> None:
        """End the watch."""
        self._watch.stop()

    def _ask(self, seconds: float) -> None:
        # /server_info goes from the HTTP process to the scheduler of every data parallel rank and back, between two
        # batches (sglang 0.5.23): at once while generation is paused, late while a batch runs or weights are loaded.
        # The others tell nothing of a scheduler that hangs: /model_info and our engines' /health come from the HTTP
        # process alone, /v1/loads is read from shared memory.
        try:
            self._client.server_info(seconds)
        except EngineHttpError as error:
            if error.status is None:
                raise  # an answer of whatever kind is one
