"""One engine after another takes the weights up (--update-weight-rolling), over fake engines."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.weight_sync.session import run_session
from tests.unit.weight_sync.test_session import OK, OneRank, engine_answers, engines, order


def rolling_engines(count: int, paused: set[int], most: list[int]) -> list[dict]:
    """Answers of engines that keep account of who is paused."""

    def watched(number: int) -> dict:
        def pause(body):
            paused.add(number)
            most.append(len(paused))
            return OK

        def go_on(body):
            paused.discard(number)
            return OK

        return engine_answers() | {"/pause_generation": pause, "/continue_generation": go_on}

    return [watched(number) for number in range(count)]


def test_rolling_pauses_one_engine_at_a_time():
    """Each proves the weights, names the version and goes on before the next is paused."""
    paused: set[int] = set()
    most: list[int] = []
    with engines(*rolling_engines(3, paused, most)) as servers:
        steps: list[str] = []
        receipt = run_session(order(servers, "disk", directory="/w", rolling=True), OneRank(steps))
        turn = ["begin", "load", "open for digests", "prove", "finish"]
        assert steps == ["connect", "send base@7", *turn, *turn, *turn]
        assert most == [1, 1, 1] and paused == set()
        assert (receipt.engines_proven, receipt.tensors_unproven) == (3, 1)
        for server in servers:
            assert server.paths == [
                "/pause_generation", "/update_weights_from_disk", "/begin_weight_update",
                "/end_weight_update", "/flush_cache", "/update_weight_version", "/model_info", "/continue_generation",
            ]  # fmt: skip
    with engines(*rolling_engines(3, paused, most)) as servers:
        run_session(order(servers, "disk", directory="/w"), OneRank([]))
        assert most[-1] == 3  # without it all of them stand


def test_a_rolling_sync_that_fails_leaves_the_others_as_they_are():
    """The first serves the new weights, the second is paused, the third was not asked anything."""
    with engines(engine_answers(), engine_answers(report_version="6"), engine_answers()) as servers:
        with pytest.raises(WeightSyncError, match=f"engine 1 at {servers[1].url} reports '6'"):
            run_session(order(servers, "disk", directory="/w", rolling=True), OneRank([]))
        assert servers[0].paths[-1] == "/continue_generation"
        assert "/continue_generation" not in servers[1].paths and servers[2].paths == []


def test_a_rolling_sync_has_the_time_of_all_its_turns():
    at_once = order([], "disk", timeout_s=10)
    servers = [EngineEndpoint(index=index, url="http://host") for index in range(4)]
    one, four = (dataclasses.replace(at_once, endpoints=tuple(servers), rolling=rolling) for rolling in (False, True))
    assert one.longest_s(1) == at_once.longest_s(1) and four.longest_s(1) > 3.9 * one.longest_s(1) - 40
