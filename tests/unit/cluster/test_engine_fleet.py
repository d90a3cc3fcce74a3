"""What a run says of a failure when an engine is dying."""

from __future__ import annotations

import pytest

from slime_like.cluster import engine_fleet
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.members import Membership
from slime_like.config.run import RunConfig
from slime_like.errors import EngineError
from slime_like.planning.placement import make_plan
from slime_like.records import EngineEndpoint
from slime_like.testing.scripted_engine import ScriptedEngine
from slime_like.utils.net import free_port


class Fleet(EngineFleet):
    """One engine, whose process is seen to have ended when asked for the third time."""

    def __init__(self, url: str):
        super().__init__(
            RunConfig(), make_plan(RunConfig()), None, "", Membership.of_serving([EngineEndpoint(index=0, url=url)])
        )
        self.asked = 0

    def check(self) -> None:
        self.asked += 1
        if self.asked == 3:
            raise EngineError("engine 0 ended with status 137")


def silent_url() -> str:
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


def test_an_engine_that_does_not_answer_is_waited_for():
    with pytest.raises(EngineError, match="ended with status 137"):
        Fleet(silent_url()).check_after_failure()


def test_but_not_for_good(monkeypatch):
    monkeypatch.setattr(engine_fleet, "_DYING_S", 0.1)
    fleet = Fleet(silent_url())
    fleet.check_after_failure()  # whatever failed is told instead
    assert fleet.asked == 2


def test_one_that_answers_is_not():
    with ScriptedEngine(lambda request: []) as engine:
        fleet = Fleet(engine.url)
        fleet.check_after_failure()
    assert fleet.asked == 1
