"""The page, its numbers, and the metrics (slime_like.tinker.api.observed)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.tinker_http import finished, trained_model, world

ROW = {
    "model_input": {"chunks": [{"tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64"},
        "weights": {"data": [1.0, 1.0], "dtype": "float32"},
    },
}


def test_losses_runs_and_sessions(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as there, there.http("tml-x") as http:
            mine = await trained_model(http)
            losses = []
            for seq_id in (3, 5):
                data = {"data": [ROW], "loss_fn": "cross_entropy"}
                body = {"model_id": mine["model"], "seq_id": seq_id, "forward_backward_input": data}
                done = await finished(http, await http.post("/api/v1/forward_backward", json=body))
                losses.append(done["metrics"]["loss:sum"])
                step = {"model_id": mine["model"], "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.1}}
                await finished(http, await http.post("/api/v1/optim_step", json=step))
            seen = (await http.get("/api/v1/overview")).json()
            (one,) = seen["runs"]
            assert one["id"] == mine["model"] and one["lora_rank"] == 2
            assert [loss for _, loss in one["losses"]] == pytest.approx(losses) and losses[1] < losses[0]
            assert [session["id"] for session in seen["sessions"]] == [mine["session"]]
            metrics = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families((await http.get("/metrics")).text)
                for sample in family.samples
            }
            assert metrics["tinker_calls_total", "forward_backward"] == 2
            assert metrics["tinker_rows_total", "forward_backward"] == 2
            assert metrics["tinker_answers_total", "optim_step", "done"] == 2
            assert metrics["tinker_http_seconds_count", "/api/v1/optim_step", "200"] == 2
            assert (
                metrics["tinker_execution", "queued_requests"] == 5
                and metrics["tinker_execution", "ended sample/done"] == 4
            )
            assert metrics["tinker_execution_seconds", "optim_step"] == 1.5
            assert metrics["tinker_things", "models"] == 1 and metrics["tinker_things", "checkpoints"] == 2
            assert metrics["tinker_http_under_way",] == 1, "the one that asks"

    asyncio.run(run())


def test_the_page_runs_its_own_script_and_asks_nobody_else(tmp_path):
    async def run() -> None:
        async with world(tmp_path) as there, there.http(None) as http:
            page = await http.get("/")
        policy = page.headers["content-security-policy"]
        for tag, rule in (("script", "script-src"), ("style", "style-src")):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.S)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{rule} 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy and "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in page.text

    asyncio.run(run())
