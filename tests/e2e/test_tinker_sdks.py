"""A client library from before protobuf was the rule, in a virtual environment of its own, against the app."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile

import httpx
import numpy as np
import pytest

from slime_like.tinker.api.settings import ApiSettings
from tests.e2e import tinker_old_client
from tests.e2e.tinker_old_client import TARGETS, TOKENS, WEIGHTS
from tests.helpers.tinker_app import MODEL, serve
from tests.helpers.tinker_bigrams import BASE, base_table, log_softmax

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(900)]


def expected() -> tuple[list[float], np.ndarray]:
    """Losses of the client's steps, and W after them."""
    table, losses = base_table(), []
    for _ in range(3):
        chances = np.exp(log_softmax(table))
        losses.append(-3 * sum(w * np.log(chances[a, b]) for a, b, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True)))
        for a, b, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True):
            table[a] -= 0.1 * 3 * w * (chances[a] - np.eye(len(table))[b])
    return losses, table


@pytest.mark.parametrize("protobuf", [True, False], ids=["protobuf", "json"])
def test_a_client_before_0_25_is_served(python_with, tmp_path, protobuf: bool):
    python = python_with("tinker==0.24.1")
    with serve(tmp_path, ApiSettings(models=(MODEL,), protobuf_passes=protobuf)) as served:
        command = [python, tinker_old_client.__file__, served.url, BASE]
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        seen = json.loads(line.removeprefix("ANSWER "))
        archive = httpx.get(seen["archive"]).content
        metrics = httpx.get(f"{served.url}/metrics").text
    losses, table = expected()
    log_probs = log_softmax(table)
    assert seen["version"] == "0.24.1"
    assert seen["losses"] == pytest.approx(losses, abs=1e-5) and losses[-1] < losses[0]
    assert seen["logprobs"] == pytest.approx(log_probs[TOKENS, TARGETS].tolist(), abs=1e-5)
    # Of the same weights as the last forward: they were saved after it.
    again = -3 * sum(w * log_probs[a, b] for a, b, w in zip(TOKENS, TARGETS, WEIGHTS, strict=True))
    assert seen["again"] == pytest.approx(again, abs=1e-5)
    assert seen["lengths"] == [4] * 4
    between = log_probs[TOKENS[:-1], TOKENS[1:]].tolist()
    for answer in (seen["prompt_logprobs"], seen["computed"]):
        assert answer[0] is None and answer[1:] == pytest.approx(between, abs=1e-5)
    assert seen["topk"] == [None, *(np.argsort(-log_probs[token])[:2].tolist() for token in TOKENS[:-1])]
    assert seen["model"] in seen["runs"]
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        assert "adapter_model.safetensors" in files.getnames()
    # JSON has a route of its own for passes without gradients.
    assert ('route="/api/v1/forward"' in metrics) is not protobuf
