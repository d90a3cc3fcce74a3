"""Registering engines, against a fake router; the real one is in tests/contract."""

from __future__ import annotations

import socket

import pytest
from sglang_backend.fake_http import serve

from slime_like.config.engine import EngineConfig
from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.router import attach_router, launch_router, start_router
from slime_like.utils.net import free_port


class Workers:
    """A router's list: a new worker is healthy when it was looked at `looks` times."""

    def __init__(self, looks: int):
        self.looks, self.items = looks, {}
        self.answers = {"/workers": self.workers}

    def workers(self, body):
        if body:
            self.items[body["url"]] = {"id": "w1", "url": body["url"], "is_healthy": False, "looks": 0}
            self.answers["/workers/w1"] = lambda _: (202, {"gone": self.items.clear()})
            return 202, {"worker_id": "w1"}
        for item in self.items.values():
            item["looks"] += 1
            item["is_healthy"] = item["looks"] > self.looks
        return 200, {"workers": list(self.items.values())}


ENGINE = {"/model_info": (200, {"weight_version": "default"})}


def test_register_waits_until_healthy_and_close_takes_our_engines_out():
    workers = Workers(looks=3)
    with serve(ENGINE, api_key="engine-key") as engine, serve(workers.answers, api_key="router-key") as fake:
        router = attach_router(fake.url, timeout_s=5, api_key="router-key")
        router.register(EngineEndpoint(index=0, url=engine.url, api_key="engine-key"), timeout_s=5)
        assert router.engine_urls() == [engine.url]
        assert ("POST", "/workers", {"url": engine.url, "api_key": "engine-key"}) in fake.calls
        router.close()
        assert workers.items == {}
        router.close()


def test_engine_that_stays_unhealthy():
    with serve(ENGINE) as engine, serve(Workers(looks=10**6).answers) as fake:
        router = attach_router(fake.url, timeout_s=5)
        with pytest.raises(
            WaitTimeout, match=f"router at {fake.url} waited 0 s for engine 7 at {engine.url} during register"
        ):
            router.register(EngineEndpoint(index=7, url=engine.url), timeout_s=0.4)


def test_engine_with_another_key_is_refused_before_it_gets_requests():
    workers = Workers(looks=0)
    with serve(ENGINE, api_key="right") as engine, serve(workers.answers) as fake:
        with pytest.raises(EngineError, match="401"):
            attach_router(fake.url, timeout_s=5).register(
                EngineEndpoint(index=0, url=engine.url, api_key="wrong"), timeout_s=5
            )
        assert workers.items == {}


def test_router_that_is_not_there():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WaitTimeout, match=f"router at {url}"):
        attach_router(url, timeout_s=0.3)


def test_router_with_another_key():
    with serve(Workers(looks=0).answers, api_key="right") as fake, pytest.raises(EngineError, match="401"):
        attach_router(fake.url, timeout_s=5, api_key="wrong")


def test_taken_port_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is taken"):
            launch_router(policy="random", port=port, log_path=f"{tmp_path}/log", timeout_s=5)


def test_a_run_uses_the_router_that_it_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("ROUTER_KEY", "right")
    with serve({"/workers": (200, {"workers": []})}, api_key="right") as server:
        port = int(server.url.rpartition(":")[2])
        engine = EngineConfig(
            sglang_router_ip="127.0.0.1", sglang_router_port=port, sglang_router_api_key_env="ROUTER_KEY"
        )
        router = start_router(engine, "cache_aware", str(tmp_path / "log"), "warning")
        assert router.url == server.url and router.poll() is None
        router.close()
    assert not (tmp_path / "log").exists(), "none of ours was started"
