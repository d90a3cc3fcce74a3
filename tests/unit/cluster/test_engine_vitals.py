"""Who has ended: processes of ours are asked for, external engines watched."""

from __future__ import annotations

import time

from slime_like.cluster.engine_vitals import Vitals
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import ScriptedEngine
from slime_like.utils.net import free_port


class Processes:
    """Of engines of ours: number 1 has ended."""

    def dead(self, known):
        return {} if 1 in known else {1: EngineError("engine 1 ended with status 137")}


def test_processes_of_ours_are_asked_for_and_what_is_known_is_not_told_again():
    vitals = Vitals(Processes())
    assert list(vitals.ended()) == [1] and vitals.ended({1}) == {}
    assert Vitals(None).ended() == {}


def test_an_external_engine_that_does_not_answer_is_named_and_ours_are_not_asked():
    silent = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with ScriptedEngine(lambda request: []) as engine:
        endpoints = [
            EngineEndpoint(index=0, url=engine.url, external=True),
            EngineEndpoint(index=1, url=silent, external=True),
            EngineEndpoint(index=2, url=silent),
        ]
        failures = Vitals(None).mute([EngineClient(endpoint, timeout_s=2.0) for endpoint in endpoints])
    assert list(failures) == [1] and f"external engine 1 at {silent} does not answer" in str(failures[1])


def test_external_engines_are_watched_and_a_watch_ends():
    vitals = Vitals(None)
    with ScriptedEngine(lambda request: []) as engine:
        vitals.watch(EngineEndpoint(index=0, url=engine.url, external=True))
        assert vitals.silent() == {}
        vitals.close()
        assert vitals.silent() == {}


def test_an_engine_of_ours_that_is_silent_hangs_and_is_not_told_of_after_it_is_forgotten():
    vitals = Vitals(Processes(), hang_timeout_s=0.4)
    with ScriptedEngine(lambda request: []) as well:
        vitals.watch(EngineEndpoint(index=0, url=f"http://127.0.0.1:{free_port('127.0.0.1')}"))
        vitals.watch(EngineEndpoint(index=2, url=well.url))
        deadline = time.monotonic() + 10
        while not (hanging := vitals.hanging()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(hanging) == [0] and "hangs: no answer to /server_info" in str(hanging[0])
        assert vitals.hanging({0}) == {}
        vitals.forget(0)
        assert vitals.hanging() == {}
        vitals.close()


def test_without_a_deadline_nobody_hangs():
    vitals = Vitals(Processes())
    vitals.watch(EngineEndpoint(index=0, url=f"http://127.0.0.1:{free_port('127.0.0.1')}"))
    time.sleep(0.3)
    assert vitals.hanging() == {}
