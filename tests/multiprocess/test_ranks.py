"""What trainer ranks tell each other in a weight sync: results, failures, and that the lead is still busy.

gloo, no model, no engine.
"""

from __future__ import annotations

import datetime
import time

import pytest
import torch

from slime_like.errors import EngineError, WaitTimeout
from slime_like.weight_sync.ranks import RankGroup, RankPlace
from tests.helpers.train_world import free_ports, run_ranks

pytestmark = pytest.mark.multiprocess

#: Of the group's collectives, in seconds: what the lead does takes longer.
COLLECTIVE_S = 3.0


def in_world(place, port):
    """Two stages of two ranks, of which the first of each gathers."""
    rank = place["rank"]
    timeout = datetime.timedelta(seconds=COLLECTIVE_S)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4, timeout=timeout
    )
    group = RankGroup(RankPlace(source=rank // 2, num_sources=2, rank_in_source=rank % 2, num_gatherers=1), "test")
    seen: dict = {"gathered": group.on_gatherers("name", lambda: rank)}
    seen["in turn"] = group.on_gatherers("turn", lambda: time.monotonic(), in_turn=True)

    def raising(error):
        def act():
            raise error

        return act

    def said(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - looked at below
            return f"{type(error).__name__}: {error}"
        return "nothing"

    acts: list = []
    started = time.monotonic()
    group.on_lead("slow", lambda: (time.sleep(COLLECTIVE_S + 2.0), acts.append(rank)), longest_s=30.0)
    seen["slow"] = time.monotonic() - started, acts
    seen["lead fails"] = said(lambda: group.on_lead("begin", raising(EngineError("engine 1 is gone")), longest_s=30.0))
    seen["lead breaks"] = said(lambda: group.on_lead("begin", raising(KeyError("x")), longest_s=30.0))
    seen["lead hangs"] = said(lambda: group.on_lead("begin", lambda: time.sleep(20), longest_s=1.5))
    late = WaitTimeout(who="trainer source 1", whom="engine 0", phase="send", seconds=3, last="nothing")
    seen["one fails"] = said(lambda: group.on_gatherers("send", raising(late) if rank == 2 else lambda: None))
    seen["both fail"] = said(lambda: group.on_gatherers("send", raising(EngineError(f"from {rank}"))))
    seen["goes on"] = group.on_gatherers("name", lambda: rank)
    torch.distributed.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(in_world, 4, free_ports(1)[0], timeout_s=90)


def test_results_of_those_that_gather_reach_all(ranks):
    assert [seen["gathered"] for seen in ranks] == [[0, 2]] * 4 and [seen["goes on"] for seen in ranks] == [[0, 2]] * 4
    assert all(first < second for first, second in (seen["in turn"] for seen in ranks))


def test_others_wait_for_a_busy_lead_longer_than_a_collective_may_take(ranks):
    assert all(seconds >= COLLECTIVE_S + 2.0 for seconds, _ in (seen["slow"] for seen in ranks))
    assert [acts for _, acts in (seen["slow"] for seen in ranks)] == [[0], [], [], []]


def test_what_the_lead_raises_everyone_raises(ranks):
    assert {seen["lead fails"] for seen in ranks} == {"EngineError: engine 1 is gone"}
    assert [seen["lead breaks"] for seen in ranks] == ["KeyError: 'x'"] + [
        "WeightSyncError: weight sync (test, begin) failed on trainer rank 0: KeyError: 'x'"
    ] * 3
    assert len({seen["lead hangs"] for seen in ranks}) == 1 and ranks[1]["lead hangs"].startswith(
        "WaitTimeout: trainer source 0 waited 2 s for begin"
    )


def test_a_failure_of_one_is_everyones_and_of_several_all_are_named(ranks):
    assert {seen["one fails"] for seen in ranks} == {
        "WaitTimeout: trainer source 1 waited 3 s for engine 0 during send. Last heard: nothing"
    }
    both = (
        "WeightSyncError: weight sync (test, send) failed on trainer rank 0: EngineError: from 0; trainer rank 2:"
        " EngineError: from 2"
    )
    assert [seen["both fail"] for seen in ranks] == ["EngineError: from 0", both, "EngineError: from 2", both]
