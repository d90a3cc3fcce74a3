"""What a run says of a failure when an engine is dying."""

from __future__ import annotations

import pytest

from slime_like.cluster import rollout_group
from slime_like.cluster.rollout_group import RolloutGroup
from slime_like.config.run import RunConfig
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import ScriptedEngine
from slime_like.utils.net import free_port


class Group(RolloutGroup):
    """One engine, whose process is seen to have ended when asked for the third time."""

    def __init__(self, url: str):
        super().__init__(RunConfig(), None, None, "")
        self.clients = [EngineClient(EngineEndpoint(index=0, url=url, api_key=None, tp_size=1), timeout_s=60)]
        self.asked = 0

    def check(self) -> None:
        self.asked += 1
        if self.asked == 3:
            raise EngineError("engine 0 ended with status 137")


def silent_url() -> str:
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


def test_an_engine_that_does_not_answer_is_waited_for():
    with pytest.raises(EngineError, match="ended with status 137"):
        Group(silent_url()).check_after_failure()


def test_but_not_for_good(monkeypatch):
    monkeypatch.setattr(rollout_group, "_DYING_S", 0.1)
    group = Group(silent_url())
    group.check_after_failure()  # whatever failed is told instead
    assert group.asked == 2


def test_one_that_answers_is_not():
    with ScriptedEngine(lambda request: []) as engine:
        group = Group(engine.url)
        group.check_after_failure()
    assert group.asked == 1
