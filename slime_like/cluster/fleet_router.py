"""The router of a fleet: who is registered with it, and another of the same address and key in its place when ours
ends, or hangs.
"""

from __future__ import annotations

import logging
import time

from slime_like.config.run import RunConfig
from slime_like.errors import EngineError, RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.hang_watch import HangWatch
from slime_like.sglang_backend.router import Router, RouterSilent, start_router

logger = logging.getLogger(__name__)


def ended_for_good(failure: RunError) -> EngineError:
    """What to say of a router's end after which no other is started."""
    return EngineError(f"{failure}\nIt is not started again: --max-router-restarts is 0, or used up.")


class FleetRouter:
    """`start` first. Clients keep url and api_key over every restart."""

    def __init__(self, config: RunConfig, run_dir: str):
        self._config, self._log_path = config, f"{run_dir}/logs/router-0.log"
        self._deadline_s = config.engine.engine_start_timeout_s
        self._restarts_left = config.engine.max_router_restarts
        self._router: Router | None = None
        self._registered: dict[str, EngineEndpoint] = {}  # by their addresses
        self._broken: RunError | None = None  # why it was ended, or why the last restart is not complete
        self._watch: HangWatch | None = None

    def start(self) -> None:
        """Our router, or the one at --sglang-router-ip, answers afterwards. Raises EngineError or WaitTimeout."""
        self._router = self._launched()

    def _launched(self) -> Router:
        engine, level = self._config.engine, self._config.observability.log_level or "warning"
        policy = self._config.router_policy
        router = start_router(engine, policy, self._log_path, level, successor_of=self._router)
        if router.is_ours and engine.engine_hang_timeout_s:
            ask = Router(router.url, router.api_key, None).ask  # with connections of its own: it is another thread
            self._watch = HangWatch(ask, timeout_s=engine.engine_hang_timeout_s, name=router.url)
        return router

    def _end_hanging(self) -> None:
        silence = None if self._watch is None else self._watch.silent_s()
        if silence is not None:
            self._broken = EngineError(
                f"the router at {self.url} hangs: no answer to /workers for {silence:.0f} s (--engine-hang-timeout-s);"
                " it is ended"
            )
            self._close_ours()

    def _close_ours(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._running.close()

    @property
    def _running(self) -> Router:
        assert self._router is not None, "start() first"
        return self._router

    @property
    def url(self) -> str:
        """Where requests go."""
        return self._running.url

    @property
    def api_key(self) -> str | None:
        """What clients show to it."""
        return self._running.api_key

    def engine_urls(self) -> list[str]:
        """Addresses of the healthy engines."""
        return self._running.engine_urls()

    def check(self) -> None:
        """Raise EngineError with the tail of the log if our router has ended."""
        try:
            self._running.check()
        except EngineError as error:
            raise (error if self.can_restart else ended_for_good(error)) from None

    def failure(self) -> RunError | None:
        """How our router has ended, or why its successor lacks engines; None while all is well, and of one that is not
        ours. One that hangs is ended.
        """
        self._end_hanging()
        if self._broken is not None:
            return self._broken
        try:
            self._running.check()
        except EngineError as error:
            return error
        return None

    @property
    def can_restart(self) -> bool:
        """Whether --max-router-restarts is not used up."""
        return self._restarts_left > 0

    def restart(self) -> float:
        """Start another in the place of ours, which has ended, and register every engine that was; the seconds.

        Raises EngineError or WaitTimeout; each try counts.
        """
        self._restarts_left -= 1
        started = time.monotonic()
        self._close_ours()
        try:
            self._router = self._launched()
            for endpoint in list(self._registered.values()):
                self._router.register(endpoint, timeout_s=self._deadline_s)
        except RunError as error:
            self._broken = error
            raise
        self._broken = None
        return time.monotonic() - started

    def register(self, endpoint: EngineEndpoint) -> None:
        """Add an engine and wait until the router calls it healthy; one of ours that does not answer meanwhile is
        ended, and another started. Raises EngineError or WaitTimeout.
        """
        self._revive()
        try:
            self._running.register(endpoint, timeout_s=self._deadline_s)
        except RouterSilent as error:
            self._end_silent(error)
            self._revive()
            self._running.register(endpoint, timeout_s=self._deadline_s)
        self._registered[endpoint.url] = endpoint

    def deregister(self, endpoint: EngineEndpoint) -> None:
        """Take an engine out. Harmless for one that is not registered, or where the router has ended: the next one
        will not hear of it. One of ours that does not answer is ended.
        """
        self._registered.pop(endpoint.url, None)
        if self._running.poll() is None:
            try:
                self._running.deregister(endpoint)
            except RouterSilent as error:
                self._end_silent(error)

    def _end_silent(self, error: RouterSilent) -> None:
        """End a router of ours that does not answer, so that it is replaced. Raises the error for one that is not ours,
        or the last one.
        """
        if not self._running.is_ours:
            raise error
        if not self.can_restart:
            raise ended_for_good(error)
        self._broken = EngineError(f"{error}. It is ended")
        self._close_ours()

    def _revive(self) -> None:
        error = self.failure()
        if error is not None:
            if not self.can_restart:
                raise error
            logger.warning("%s", error)
            self.restart()

    def close(self) -> None:
        """Take external engines out, and end ours. Harmless when called twice, or without a start."""
        if self._router is None:
            return
        for endpoint in list(self._registered.values()):
            if endpoint.external:
                try:
                    self.deregister(endpoint)
                except RunError as error:
                    logger.warning("engine %s stays registered: %s", endpoint.url, error)
        self._close_ours()
