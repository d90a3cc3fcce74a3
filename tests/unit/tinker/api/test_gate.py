"""Who is let in, and with how much: slime_like.tinker.api.gate and slime_like.tinker.api.identity."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

import httpx
import pytest

from slime_like.tinker import keys
from slime_like.tinker.api.settings import TenantQuota
from slime_like.tinker.api.wire.bounds import BodyLimits
from slime_like.tinker.store import key_rows
from tests.helpers.tinker_http import World, postgres_world, trained_model, world

CAPABILITIES = "/api/v1/get_server_capabilities"


def run_in(folder: Path, check, over=world, **settings) -> None:
    async def run() -> None:
        async with over(folder, **settings) as there:
            await check(there)

    asyncio.run(run())


async def status(there: World, key: str | None, path: str = CAPABILITIES, **more) -> int:
    async with there.http(key, **more) as http:
        return (await http.get(path)).status_code


def test_without_keys_this_machine_alone_is_served(tmp_path):
    async def check(there: World) -> None:
        for key in ("tml-anything", None):
            assert await status(there, key) == 200
            assert await status(there, key, address="::1", host="[::1]") == 200
            assert await status(there, key, address="10.0.0.5") == 401
            assert await status(there, key, host="evil.example") == 401, "a page of elsewhere, resolved to this host"
        async with there.http("tml-x") as http:
            for host in ("[::1", "127.0.0.1@evil.example", ""):
                assert (await http.get(CAPABILITIES, headers={"Host": host})).status_code == 401
        async with there.http("tml-x") as http:
            assert (await http.get("/api/v1/overview")).json()["tenant"] == "local"

    run_in(tmp_path, check)


def test_with_keys_only_those_that_count(tmp_path):
    async def check(there: World) -> None:
        assert await status(there, None) == 200
        key = await there.key("ann")
        assert await status(there, None) == 401, "the first key closes the server at once"
        assert await status(there, "tml-anything") == 401
        assert await status(there, key[:-1] + ("A" if key[-1] != "A" else "B")) == 401
        assert await status(there, key, address="10.0.0.5", host="tinker.example") == 200
        async with there.http(None) as http:
            bearer = await http.get(CAPABILITIES, headers={"Authorization": f"Bearer {key}"})
            assert bearer.status_code == 200
        await key_rows.revoke_keys(there.database, "ann", None)
        await asyncio.sleep(0.15)
        assert await status(there, key) == 401
        assert await status(there, None) == 401, "no key that counts is not the same as no keys"

    run_in(tmp_path, check, key_cache_s=0.1)


def test_a_key_is_hashed_once_in_a_while(tmp_path):
    async def check(there: World) -> None:
        key = await there.key("ann")
        began = time.process_time()
        keys.hash_key(key)
        one_hash_s = time.process_time() - began
        assert await status(there, key) == 200
        began = time.process_time()
        for _ in range(20):
            assert await status(there, key) == 200
        assert time.process_time() - began < 20 * one_hash_s / 2

    run_in(tmp_path, check)


def test_no_route_is_open_but_those_that_tell_nothing(tmp_path):
    async def check(there: World) -> None:
        await there.key("ann")
        for path in ("/", "/api/v1/healthz"):
            assert await status(there, None, path) == 200
        for path in (CAPABILITIES, "/metrics", "/api/v1/overview", "/v1/models", "/docs", "/openapi.json", "/nothing"):
            assert await status(there, None, path) == 401

    run_in(tmp_path, check)


async def slowly(pieces: list[bytes], pause_s: float):
    for piece in pieces:
        yield piece
        await asyncio.sleep(pause_s)


def test_a_body_is_read_up_to_a_size_and_within_a_time(tmp_path):
    async def check(there: World) -> None:
        async with there.http("tml-x") as http:
            small = await http.post("/api/v1/forward_backward", content=b"x" * 3000)
            assert small.status_code == 422
            assert (await http.post("/api/v1/forward_backward", content=b"x" * 4001)).status_code == 413
            assert (await http.post("/api/v1/optim_step", content=b" " * 2001)).status_code == 413
            endless = slowly([b"x" * 500] * 100, 0)
            assert (await http.post("/api/v1/forward_backward", content=endless)).status_code == 413
            late = await http.post("/api/v1/forward_backward", content=slowly([b"x", b"x"], 0.5))
            assert late.status_code == 408

    run_in(tmp_path, check, body_s=0.3, limits=BodyLimits(body_bytes=4000, json_bytes=2000))


@pytest.mark.slow
def test_a_tenant_has_so_much_under_way(tmp_path):
    async def check(there: World) -> None:
        key, other, large = await there.key("ann"), await there.key("bob"), await there.key("eve", requests=10)
        async with there.http(key) as ann, there.http(other) as bob, there.http(large) as eve:
            ids = {}
            for name, http in (("ann", ann), ("bob", bob), ("eve", eve)):
                mine = await trained_model(http)
                held = {"sampling_session_id": mine["sampler"], "seq_id": 0, "sampling_params": {}}
                asked = await http.post("/api/v1/asample", json={**held, "prompt": {"chunks": [{"tokens": [31]}]}})
                ids[name] = {"request_id": asked.json()["request_id"]}

            async def waits(http: httpx.AsyncClient, name: str, number: int) -> list[int]:
                path = "/api/v1/retrieve_future"
                answers = await asyncio.gather(*(http.post(path, json=ids[name]) for _ in range(number)))
                assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 429)
                return sorted(answer.status_code for answer in answers)

            assert await waits(ann, "ann", 5) == [200, 200, 200, 429, 429]
            both = await asyncio.gather(waits(ann, "ann", 3), waits(bob, "bob", 3), waits(eve, "eve", 8))
            assert both == [[200] * 3, [200] * 3, [200] * 8]

    run_in(tmp_path, check, quota=TenantQuota(requests=3))


def test_bytes_of_bodies_are_counted_per_tenant(tmp_path):
    async def check(there: World) -> None:
        async with there.http(await there.key("ann")) as ann, there.http(await there.key("bob")) as bob:

            async def send(http: httpx.AsyncClient) -> int:
                await http.get(CAPABILITIES)  # its key is known then, and both send at the same time
                body = slowly([b"x" * 1000] * 3, 0.4)
                return (await http.post("/api/v1/forward_backward", content=body)).status_code

            codes = await asyncio.gather(send(ann), send(ann), send(bob))
            assert sorted(codes[:2]) == [422, 429] and codes[2] == 422
            assert await send(ann) == 422, "what has ended is given back"

    run_in(tmp_path, check, quota=TenantQuota(body_bytes=4500))


def test_errors_have_the_form_that_each_face_reads(tmp_path):
    async def check(there: World) -> None:
        async with there.http("tml-x") as http:
            ours = await http.post("/api/v1/create_model", json={"session_id": "s"})
            assert ours.status_code == 422 and ours.json()["category"] == "user"
            assert "model_seq_id: Field required" in ours.json()["error"]
            theirs = await http.post("/v1/completions", json={"model": "none", "prompt": "x"})
            assert theirs.status_code == 400 and "'none' is not served" in theirs.json()["error"]["message"]
            assert (await http.get("/api/v1/nothing")).status_code == 404
            assert (await http.get("/api/v1/optim_step")).status_code == 405
            assert (await http.post("/api/v1/optim_step", content=b"[" * 100_000)).status_code in (400, 422)
            assert (await http.post("/api/v1/optim_step", content=b'{"adam_params":{"beta1":NaN}}')).status_code == 422

    run_in(tmp_path, check)


def test_a_defect_is_told_to_the_log_and_not_to_the_client(tmp_path, caplog):
    async def check(there: World) -> None:
        there.service.refusal = ZeroDivisionError("secret detail")  # type: ignore[assignment]
        key = await there.key("ann")
        async with there.http(key) as http:
            session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "bigrams"}
            answer = await http.post("/api/v1/create_model", json=body)
            assert answer.status_code == 500 and answer.json()["category"] == "server"
            assert "secret" not in answer.text
        assert key not in caplog.text and key[17:] not in caplog.text

    with caplog.at_level(logging.DEBUG):
        run_in(tmp_path, check)
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("over", [world, pytest.param(postgres_world, marks=pytest.mark.slow)])
def test_texts_that_a_database_or_an_answer_cannot_hold_are_refused(tmp_path, over):
    async def check(there: World) -> None:
        async with there.http("tml-x") as http:
            for body in ({"user_metadata": {"a": "\ud800"}}, {"display_name": "\ud800"}, {"tags": ["a\0b"]}):
                assert (await http.post("/api/v1/create_session", content=json.dumps(body))).status_code == 422, body
            assert (await http.post("/api/v1/get_info", json={"model_id": "a\0:train:0"})).status_code == 422
            for path in ("sessions/a%00b", "training_runs/a%00b", "samplers/a%00b", "sessions/%ED%A0%80"):
                assert (await http.get(f"/api/v1/{path}")).status_code == 404
            saved = "/api/v1/training_runs/a%00/checkpoints/weights/b"
            assert (await http.delete(saved)).status_code == 404
            assert (await http.get(f"{saved}/archive")).status_code == 404
            same = {"X-Idempotency-Key": "one"}
            begun = await asyncio.gather(
                *(http.post("/api/v1/create_session", json={}, headers=same) for _ in range(8))
            )
            assert len({answer.json()["session_id"] for answer in begun}) == 1
            (session,) = {answer.json()["session_id"] for answer in begun}
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "bigrams"}
            opened = await asyncio.gather(*(http.post("/api/v1/create_sampling_session", json=body) for _ in range(8)))
            assert [answer.status_code for answer in opened] == [200] * 8

    run_in(tmp_path, check, over)


@pytest.mark.slow
def test_malformed_bodies_never_fail_the_server(tmp_path):
    import numpy as np

    async def check(there: World) -> None:
        rng = np.random.default_rng(0)
        async with there.http("tml-x") as http:
            mine = await trained_model(http)
            paths = [
                "optim_step",
                "asample",
                "create_model",
                "load_weights",
                "save_weights",
                "forward",
                "create_session",
            ]
            values = [None, -1, 2**70, 1e308, "", "x" * 5000, [], {}, [[]], True, mine["model"], mine["sampler"], [1]]
            keys = ["model_id", "seq_id", "session_id", "adam_params", "sampling_params", "prompt", "path", "tags"]
            keys += ["sampling_session_id", "model_seq_id", "base_model", "optimizer", "forward_input", "num_samples"]
            for _ in range(300):
                body = {keys[i]: values[int(rng.integers(len(values)))] for i in rng.choice(len(keys), 5)}
                answer = await http.post(f"/api/v1/{paths[int(rng.integers(len(paths)))]}", json=body)
                assert answer.status_code < 500, (body, answer.text)

    run_in(tmp_path, check)
