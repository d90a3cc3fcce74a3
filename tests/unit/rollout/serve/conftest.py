"""One endpoint for the tests of a file: a test gives its engine a script."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI

from slime_like.testing.scripted_engine import ScriptedEngine
from tests.unit.rollout.serve.served import says, served


@pytest.fixture(scope="module")
def server(tokenizer):
    with ScriptedEngine(says(tokenizer, "yes")) as engine, served(engine) as running:
        yield running


@pytest.fixture
def http(server):
    """A client of the endpoint; what was asked of the engine before is forgotten."""
    server.engine.requests.clear()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def openai_client(server):
    """Makes openai's own client for a session."""

    def make(session: str, **options) -> OpenAI:
        return OpenAI(base_url=f"{server.url}/sessions/{session}/v1", api_key="k", max_retries=0, **options)

    return make
