"""Starts sglang-router, or uses one that already runs, and keeps its list of engines.

Keys: clients show `router.api_key` to the router; the router shows each engine the key that it was registered with.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import requests

from slime_like.config.engine import EngineConfig
from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.router_server import KEY_VARIABLE
from slime_like.utils.files import PACKAGE_ROOT
from slime_like.utils.guard import GuardedProcess, start_guarded
from slime_like.utils.net import (
    certificates,
    engine_url,
    free_port,
    host_port,
    http_url,
    port_is_free,
    wait_until,
    with_another_port,
)

logger = logging.getLogger(__name__)

_LOG_LINES = 30
_REQUEST_TIMEOUT_S = 10.0
#: Our names of levels -> the router's.
_LOG_LEVELS = {"debug": "debug", "info": "info", "warning": "warn", "error": "error"}
#: rustls, unlike OpenSSL, refuses a server certificate that says that it is an authority (`openssl req -x509` writes
#: that by default).
_HTTPS_HINT = (
    "; over https it asks for a certificate with basicConstraints CA:FALSE, signed by (or being) one in"
    " REQUESTS_CA_BUNDLE"
)


class RouterSilent(EngineError):
    """No answer from a router that has not ended."""


class Router:
    """A router with registered engines; made by `launch_router` or `attach_router`."""

    def __init__(self, url: str, api_key: str | None, process: GuardedProcess | None):
        self.url = url
        self.api_key = api_key
        self._process = process  # None: it is not ours
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the environment must not stand between us and our own hosts
        self._session.verify = certificates() or True
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._workers: dict[str, str] = {}  # engine url -> the router's id of it

    def poll(self) -> int | None:
        """None while our router runs (always for one that is not ours), else its exit status."""
        return self._process.poll() if self._process else None

    @property
    def is_ours(self) -> bool:
        """Whether we have started it."""
        return self._process is not None

    def ask(self, timeout_s: float) -> None:
        """Raise EngineError unless it answers in time."""
        self._request("GET", "/workers", timeout_s=timeout_s)

    def check(self) -> None:
        """Raise EngineError with the tail of the log if our router has ended."""
        code = self.poll()
        if code is not None and self._process:
            raise EngineError(
                f"the router at {self.url} ended with status {code}. End of"
                f" {self._process.log_path}:\n{self._process.log_tail(_LOG_LINES)}"
            )

    def register(self, endpoint: EngineEndpoint, timeout_s: float) -> None:
        """Add an engine and wait until the router calls it healthy. Raises EngineError or WaitTimeout."""
        # The router asks only /health, which needs no key: with a wrong one it would route to the engine and get 401
        # for every request.
        EngineClient(endpoint, timeout_s=_REQUEST_TIMEOUT_S).model_info()
        # Registering is queued: with an older entry still listed, we would not see when the new one is in, and it could
        # come after a deregister. The older entry may hold another key, too.
        self.deregister(endpoint)
        body = {"url": endpoint.url, **({"api_key": endpoint.api_key} if endpoint.api_key else {})}
        answer = self._request("POST", "/workers", body)
        if isinstance(answer, dict) and answer.get("worker_id"):
            self._workers[endpoint.url] = answer["worker_id"]

        def probe() -> str | None:
            self.check()
            worker = self._find(endpoint.url)
            if worker is None:
                return "the router does not list it yet" + (_HTTPS_HINT if endpoint.url.startswith("https:") else "")
            self._workers[endpoint.url] = worker.get("id", endpoint.url)
            return None if worker.get("is_healthy") else f"the router says {worker}"

        wait_until(
            probe,
            deadline_s=timeout_s,
            who=f"router at {self.url}",
            whom=f"engine {endpoint.index} at {endpoint.url}",
            phase="register",
        )

    def deregister(self, endpoint: EngineEndpoint, timeout_s: float = 10.0) -> None:
        """Take an engine out and wait until the router no longer lists it. Harmless for one that is not registered."""
        worker = self._find(endpoint.url)
        if worker is None:
            self._workers.pop(endpoint.url, None)
            return
        self._request("DELETE", f"/workers/{worker['id']}")

        def probe() -> str | None:
            return "the router still lists it" if self._find(endpoint.url) else None

        wait_until(
            probe,
            deadline_s=timeout_s,
            who=f"router at {self.url}",
            whom=f"engine {endpoint.index} at {endpoint.url}",
            phase="deregister",
        )
        self._workers.pop(endpoint.url, None)

    def engine_urls(self) -> list[str]:
        """Addresses of the healthy engines."""
        return [worker["url"] for worker in self._list() if worker.get("is_healthy")]

    def close(self) -> None:
        """End our router; take our engines out of one that is not ours. Harmless when called twice."""
        if self._process is not None:
            self._process.close(grace_s=2.0)
            return
        for url in list(self._workers):
            try:
                self.deregister(EngineEndpoint(index=-1, url=url))
            except EngineError as error:
                logger.warning("engine %s stays registered with the router at %s: %s", url, self.url, error)
            except WaitTimeout as error:
                logger.warning("%s", error)
            self._workers.pop(url, None)

    def _list(self) -> list[dict]:
        answer = self._request("GET", "/workers")
        return answer.get("workers", []) if isinstance(answer, dict) else []

    def _find(self, url: str) -> dict | None:
        return next((worker for worker in self._list() if worker.get("url") == url), None)

    def _request(self, method: str, path: str, body: dict | None = None, timeout_s: float | None = None) -> Any:
        what = f"router: {method} {self.url}{path}"
        timeout_s = _REQUEST_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            response = self._session.request(method, self.url + path, json=body, timeout=timeout_s)
        except requests.RequestException as error:
            self.check()  # if it has ended, its log says more than a refused connection
            raise RouterSilent(f"{what} failed: {error}") from error
        if response.status_code >= 400:
            raise EngineError(f"{what} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError:
            return response.text


def start_router(
    engine: EngineConfig, policy: str, log_path: str, log_level: str, *, successor_of: Router | None = None
) -> Router:
    """The router of a run: the one at --sglang-router-ip, else one of our own with the policy. As launch_router and
    attach_router. successor_of: one of our own that has ended, whose address and key it takes.
    """
    if engine.sglang_router_ip:
        assert engine.sglang_router_port is not None, "--sglang-router-ip is refused without it"
        return attach_router(
            engine_url(host_port(engine.sglang_router_ip, engine.sglang_router_port)),
            timeout_s=engine.engine_start_timeout_s,
            api_key=os.environ.get(engine.sglang_router_api_key_env),
        )
    return launch_router(
        policy=policy,
        port=engine.sglang_router_port if successor_of is None else urlsplit(successor_of.url).port,
        log_path=log_path,
        timeout_s=engine.engine_start_timeout_s,
        api_key=None if successor_of is None else successor_of.api_key,
        log_level=log_level,
    )


def launch_router(
    *,
    policy: str,
    log_path: str,
    timeout_s: float,
    port: int | None = None,
    host: str = "127.0.0.1",
    request_timeout_s: float = 3600.0,
    api_key: str | None = None,
    log_level: str = "warning",
) -> Router:
    """Start sglang-router without engines and wait until it answers.

    It dies with us and asks for a key that we make up.
    Raises EngineError (port taken, not installed, ended; with the tail of its log) or WaitTimeout.
    """
    if importlib.util.find_spec("sglang_router") is None:
        raise EngineError(f"sglang-router is not installed in {sys.prefix}. Fix: pip install sglang-router.")
    if port is not None and not port_is_free(host, port):
        raise EngineError(
            f"the router's port {port} on {host} is taken. Fix: another --sglang-router-port, or none, which takes a"
            " free one."
        )
    key = api_key or secrets.token_hex(24)

    def launch() -> Router:
        arguments = _arguments(policy, host, port if port is not None else free_port(host), request_timeout_s)
        arguments["log-level"] = _LOG_LEVELS[log_level]
        argv = [
            sys.executable,
            "-m",
            "slime_like.sglang_backend.router_server",
            *(f"--{name}={value}" for name, value in arguments.items()),
        ]
        env = {
            **os.environ,
            KEY_VARIABLE: key,
            "PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if (trusted := certificates()) is not None:
            # Its health checks (0.3.2) do not look at --ca-cert-paths, but at OpenSSL's own variables: else an engine
            # behind a private certificate is shut out after three of them.
            env["SSL_CERT_DIR" if os.path.isdir(trusted) else "SSL_CERT_FILE"] = trusted
        router = Router(
            http_url(host, int(str(arguments["port"]))),
            key,
            start_guarded(argv, env=env, log_path=log_path, secrets=(key,)),
        )
        try:
            _wait_healthy(router, timeout_s)
        except BaseException:
            router.close()
            raise
        return router

    return with_another_port(launch, port_given=port is not None)


def _arguments(policy: str, host: str, port: int, request_timeout_s: float) -> dict[str, object]:
    """sglang-router's command line, without the key."""
    arguments: dict[str, object] = {
        "host": host,
        "port": port,
        "policy": policy,
        "prometheus-host": "127.0.0.1",
        "prometheus-port": free_port(),  # the default is one fixed port: a second router on the host would not start
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 5,
        "request-timeout-secs": int(request_timeout_s),
        "shutdown-grace-period-secs": 1,
        # Of policy manual: where a new session goes. Its default draws lots, which leaves engines unequally busy.
        "assignment-mode": "min_load",
        # Never: ten failures in a row would shut an engine out for a minute, and stale connections into a healthy one
        # are as many in a moment. The router tries again by itself, and its health checks take dead engines out.
        "cb-failure-threshold": 2**32 - 1,
    }
    if trusted := certificates():
        arguments["ca-cert-paths"] = trusted  # for engines behind https
    return arguments


def attach_router(url: str, *, timeout_s: float, api_key: str | None = None) -> Router:
    """Use a router that already runs; `close` leaves it running, without our engines.

    Raises WaitTimeout if it does not answer.
    """
    router = Router(url.rstrip("/"), api_key, None)
    _wait_healthy(router, timeout_s)
    return router


def _wait_healthy(router: Router, timeout_s: float) -> None:
    start = time.monotonic()

    def probe() -> str | None:
        router.check()
        try:
            router._list()  # not /health: that answers 503 as long as no engine is registered, in some versions
        except EngineError as error:
            if "answered 401" in str(error):
                raise
            return str(error)
        return None

    wait_until(probe, deadline_s=timeout_s, who="launcher", whom=f"router at {router.url}", phase="start")
    logger.info("router at %s answers after %.1f s", router.url, time.monotonic() - start)
