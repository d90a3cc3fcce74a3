"""A tenant's ids do not exist for another: every route answers them as if they were made up.

What it holds of slime_like.tinker.store.clients and slime_like.tinker.store.rows holds of all routes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.routing import APIRoute

from slime_like.tinker.api.app import ROUTERS
from slime_like.tinker.api.wire.messages import MESSAGES
from tests.helpers.tinker_bigrams import BASE
from tests.helpers.tinker_http import World, postgres_world, real_world, trained_model, world

#: Routes that name nothing of a tenant's.
WITHOUT_IDS = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "GET /api/v1/healthz",
    "GET /api/v1/get_server_capabilities",
    "POST /api/v1/create_session",
    "POST /api/v1/telemetry",
    "GET /",
    "GET /metrics",
}
#: Routes that list a tenant's own: nobody else's are among them.
LISTS = {
    "GET /api/v1/training_runs",
    "GET /api/v1/checkpoints",
    "GET /api/v1/sessions",
    "GET /api/v1/overview",
    "GET /v1/models",
}


def pass_body(model: str) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=9, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    for name, dtype, kind in (("target_tokens", 2, "<i8"), ("weights", 1, "<f4")):
        values = np.ones(1, kind).tobytes()
        datum.loss_fn_inputs[name].CopyFrom(MESSAGES["Tensor"](dense=values, dtype=dtype))
    return message.SerializeToString()


def attempts(ids: dict[str, str]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Route -> requests that name a tenant's ids."""
    model, session, sampler = ids["model"], ids["session"], ids["sampler"]
    step = {"model_id": model, "seq_id": 9}
    datum = {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64"}},
    }
    data = {"data": [datum], "loss_fn": "cross_entropy"}
    proto = {"Content-Type": "application/x-protobuf"}
    run = f"/api/v1/training_runs/{model}"
    saved = f"{run}/checkpoints/sampler_weights/weights"
    asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}

    def post(path: str, /, **json: Any) -> tuple[str, str, dict[str, Any]]:
        return "POST", f"/api/v1/{path}", {"json": json}

    from_state = {"session_id": session, "model_seq_id": 5, "optimizer": False}
    template = "/api/v1/training_runs/{model_id}"
    of_one = f"{template}/checkpoints/{{folder}}/{{name}}"
    return {
        "POST /api/v1/session_heartbeat": [post("session_heartbeat", session_id=session)],
        "POST /api/v1/sessions/{session_id}/finish": [post(f"sessions/{session}/finish")],
        "POST /api/v1/create_model": [post("create_model", session_id=session, model_seq_id=7, base_model=BASE)],
        "POST /api/v1/get_info": [post("get_info", model_id=model)],
        "POST /api/v1/forward_backward": [
            ("POST", "/api/v1/forward_backward", {"content": pass_body(model), "headers": proto}),
            post("forward_backward", **step, forward_backward_input=data),
        ],
        "POST /api/v1/forward": [post("forward", **step, forward_input=data)],
        "POST /api/v1/optim_step": [post("optim_step", **step, adam_params={})],
        "POST /api/v1/save_weights": [post("save_weights", **step, path="x")],
        "POST /api/v1/save_weights_for_sampler": [
            post("save_weights_for_sampler", **step, path="x"),
            post("save_weights_for_sampler", **step, sampling_session_seq_id=9),
        ],
        "POST /api/v1/save_weights_external": [post("save_weights_external", **step, path="x")],
        "POST /api/v1/load_weights": [
            post("load_weights", **step, path=ids["state"], optimizer=False),
            post("load_weights", **from_state, path=ids["state"]),
            post("load_weights", **from_state | {"session_id": "MINE"}, path=ids["state"]),
            post("load_weights", model_id="MY_MODEL", seq_id=9, path=ids["state"], optimizer=False),
        ],
        "POST /api/v1/unload_model": [post("unload_model", model_id=model)],
        "POST /api/v1/create_sampling_session": [
            post("create_sampling_session", session_id=session, sampling_session_seq_id=5, base_model=BASE),
            post("create_sampling_session", session_id="MINE", sampling_session_seq_id=5, model_path=ids["weights"]),
        ],
        "GET /api/v1/samplers/{sampler_id}": [("GET", f"/api/v1/samplers/{sampler}", {})],
        "POST /api/v1/asample": [post("asample", sampling_session_id=sampler, seq_id=0, **asked)],
        "POST /api/v1/retrieve_future": [post("retrieve_future", request_id=ids["request"])],
        f"GET {template}": [("GET", run, {})],
        f"GET {template}/checkpoints": [("GET", f"{run}/checkpoints", {})],
        f"DELETE {of_one}": [("DELETE", saved, {})],
        f"POST {of_one}/publish": [("POST", f"{saved}/publish", {})],
        f"DELETE {of_one}/publish": [("DELETE", f"{saved}/publish", {})],
        f"PUT {of_one}/ttl": [("PUT", f"{saved}/ttl", {"json": {"ttl_seconds": 1}})],
        f"GET {of_one}/archive": [("GET", f"{saved}/archive", {})],
        f"GET {of_one}/external_weights_urls": [("GET", f"{saved}/external_weights_urls", {})],
        "POST /api/v1/weights_info": [post("weights_info", tinker_path=ids["weights"])],
        "GET /api/v1/sessions/{session_id}": [("GET", f"/api/v1/sessions/{session}", {})],
        "GET /api/v1/links/{token}/{name:path}": [("GET", "/api/v1/links/guessed/adapter_config.json", {})],
        "POST /v1/chat/completions": [
            ("POST", "/v1/chat/completions", {"json": {"model": ids["weights"], "messages": []}})
        ],
        "POST /v1/completions": [("POST", "/v1/completions", {"json": {"model": ids["weights"], "prompt": [1]}})],
    }


async def ask(http: httpx.AsyncClient, attempt: tuple[str, str, dict[str, Any]], own: dict[str, str]) -> httpx.Response:
    """One attempt; what it has of its own goes in where it says so."""
    method, path, rest = attempt
    if "json" in rest:
        mine = {"MINE": own["session"], "MY_MODEL": own["model"]}
        rest = {"json": {k: mine.get(v, v) if isinstance(v, str) else v for k, v in rest["json"].items()}}
    return await http.request(method, path, **rest)


def routes() -> set[str]:
    return {
        f"{method} {route.path}"
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }


def test_every_route_is_here():
    without = WITHOUT_IDS | LISTS | {"POST /api/v1/cancel_future"}
    tried = set(attempts({key: key for key in ("model", "session", "sampler", "state", "weights", "request")}))
    assert not tried & without and tried | without == routes()


@pytest.mark.parametrize("over", [world, real_world, pytest.param(postgres_world, marks=pytest.mark.slow)])
def test_another_tenants_ids_are_as_good_as_made_up(tmp_path: Path, over):
    async def check(there: World) -> None:
        async with there.http(await there.key("ann")) as ann, there.http(await there.key("bob")) as bob:
            hers, his = await trained_model(ann), await trained_model(bob)
            done = there.executed()
            for route, tries in attempts(hers).items():
                for attempt in tries:
                    answer = await ask(bob, attempt, his)
                    assert answer.status_code == 404, (route, attempt, answer.status_code, answer.text)
            assert there.executed() == done, "nothing was executed"
            # Whatever the message names came in with the request: a made-up id gets the same words.
            real = await bob.post("/api/v1/get_info", json={"model_id": hers["model"]})
            made_up = await bob.post("/api/v1/get_info", json={"model_id": "x" * 36 + ":train:0"})
            assert real.text.replace(hers["model"], "*") == made_up.text.replace("x" * 36 + ":train:0", "*")
            for route in LISTS:
                listed = await bob.get(route.partition(" ")[2])
                assert listed.status_code == 200
                assert not any(identity in listed.text for identity in hers.values()), route
                assert his["session"] in listed.text or his["weights"] in listed.text, route
            # Everything of hers is still there, and hers.
            for path in (f"/api/v1/samplers/{hers['sampler']}", f"/api/v1/training_runs/{hers['model']}"):
                assert (await ann.get(path)).status_code == 200
            (weights, state) = (await ann.get("/api/v1/checkpoints")).json()["checkpoints"]
            assert not weights["public"] and weights["expires_at"] is None and not state["public"]
            assert (await ann.get(f"/api/v1/sessions/{hers['session']}")).status_code == 200

    async def run() -> None:
        async with over(tmp_path) as there:
            await check(there)

    asyncio.run(run())


def test_cancelling_anothers_request_does_nothing(tmp_path: Path):
    async def run() -> None:
        async with world(tmp_path) as there:
            async with there.http(await there.key("ann")) as ann, there.http(await there.key("bob")) as bob:
                hers = await trained_model(ann)
                held = {"sampling_session_id": hers["sampler"], "seq_id": 0, "sampling_params": {}}
                asked = await ann.post("/api/v1/asample", json={**held, "prompt": {"chunks": [{"tokens": [31]}]}})
                body = {"request_id": asked.json()["request_id"]}
                assert (await bob.post("/api/v1/cancel_future", json=body)).status_code == 204
                assert there.service.num_cancelled == 0
                waiting = (await ann.post("/api/v1/retrieve_future", json=body)).json()
                assert waiting["type"] == "try_again" and waiting["queue_state_reason"] == "held by the test"
                assert (await ann.post("/api/v1/cancel_future", json=body)).status_code == 204
                done = (await ann.post("/api/v1/retrieve_future", json=body)).json()
                assert done == {"error": "cancelled", "category": "user"}

    asyncio.run(run())


def test_public_weights_may_be_used_and_not_changed(tmp_path: Path):
    async def run() -> None:
        async with world(tmp_path) as there:
            async with there.http(await there.key("ann")) as ann, there.http(await there.key("bob")) as bob:
                hers, his = await trained_model(ann), await trained_model(bob)
                saved = f"/api/v1/training_runs/{hers['model']}/checkpoints/sampler_weights/weights"
                assert (await ann.post(f"{saved}/publish")).status_code == 204
                body = {"session_id": his["session"], "sampling_session_seq_id": 4, "model_path": hers["weights"]}
                assert (await bob.post("/api/v1/create_sampling_session", json=body)).status_code == 200
                assert (await bob.get(f"{saved}/archive")).status_code == 302
                info = await bob.post("/api/v1/weights_info", json={"tinker_path": hers["weights"]})
                assert info.json()["lora_rank"] == 2
                for method, path in (("DELETE", saved), ("DELETE", f"{saved}/publish"), ("POST", f"{saved}/publish")):
                    assert (await bob.request(method, path)).status_code == 404
                assert (await bob.get("/api/v1/training_runs/" + hers["model"])).status_code == 404

    asyncio.run(run())
