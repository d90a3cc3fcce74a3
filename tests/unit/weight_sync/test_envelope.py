"""The order of a weight sync on every engine, and what stops it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest
from sglang_backend.fake_http import FakeServer, serve

from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.envelope import WeightUpdate, version_directory
from slime_like.weight_sync.together import run_together

OK = (200, {"success": True})


def engine_answers(report_version=None) -> dict:
    """A fake engine's answers; it reports the version it was told, or `report_version`."""
    state = {"version": "default"}
    return {
        **dict.fromkeys(
            ["/pause_generation", "/flush_cache", "/begin_weight_update", "/end_weight_update", "/continue_generation", "/update_weights_from_disk"], OK
        ),
        "/update_weight_version": lambda body: (state.update(version=body["new_version"]), OK)[1],
        "/model_info": lambda body: (200, {"weight_version": report_version or state["version"]}),
    }


@contextlib.contextmanager
def engines(*answers: dict):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(answer)) for answer in answers]


def clients(servers: list[FakeServer]) -> list[EngineClient]:
    return [EngineClient(EngineEndpoint(index=i, url=server.url), timeout_s=5) for i, server in enumerate(servers)]


def test_order_of_requests():
    with engines(engine_answers(), engine_answers()) as servers:
        update = WeightUpdate(clients(servers), "ipc", timeout_s=5)
        update.begin()
        update.finish(7)
        for server in servers:
            assert server.paths == [
                "/pause_generation", "/begin_weight_update",
                "/end_weight_update", "/flush_cache", "/update_weight_version", "/model_info", "/continue_generation",
            ]  # fmt: skip
            assert server.calls[0][2] == {"mode": "abort"}
            assert server.calls[4][2]["new_version"] == "7"


def test_disk_is_loaded_outside_of_a_session_and_compared_in_one():
    with engines(engine_answers()) as servers:
        update = WeightUpdate(clients(servers), "disk", timeout_s=5)
        update.begin()
        update.load(7, "/w")
        update.open_for_digests()
        update.finish(7)
        order = [path for path in servers[0].paths if path in ("/update_weights_from_disk", "/begin_weight_update", "/end_weight_update")]
        assert order == ["/update_weights_from_disk", "/begin_weight_update", "/end_weight_update"]
        assert [body["model_path"] for _, path, body in servers[0].calls if path == "/update_weights_from_disk"] == [version_directory("/w", 7)]


def test_disk_needs_its_folder():
    with pytest.raises(WeightSyncError, match="folder"):
        WeightUpdate([], "disk", timeout_s=1).load(1, None)


def test_wrong_version_is_named_and_generation_stays_paused():
    with engines(engine_answers(), engine_answers(report_version="6")) as servers:
        update = WeightUpdate(clients(servers), "broadcast", timeout_s=5)
        update.begin()
        with pytest.raises(WeightSyncError, match=f"weight version 7 was sent, but engine 1 at {servers[1].url} reports '6'"):
            update.finish(7)
        assert all("/continue_generation" not in server.paths for server in servers)


def test_abandon_closes_sessions_without_continuing_even_if_one_engine_is_gone():
    with engines(engine_answers()) as servers:
        with engines(engine_answers()) as gone:
            update = WeightUpdate(clients(gone + servers), "ipc", timeout_s=5)
            update.begin()
        update.abandon()
        assert servers[0].paths[-1] == "/end_weight_update"
        assert "/continue_generation" not in servers[0].paths


def test_engine_without_pause_gets_its_requests_aborted():
    answers = engine_answers()
    del answers["/pause_generation"]
    with engines({**answers, "/abort_request": OK}) as servers:
        WeightUpdate(clients(servers), "ipc", timeout_s=5).begin()
        assert servers[0].paths[:2] == ["/pause_generation", "/abort_request"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_mode_that_the_engine_does_not_know_is_refused(mode):
    answers = engine_answers()
    del answers["/pause_generation"]
    for absent, said in (({}, "cannot pause"), ({"/pause_generation": (422, {"detail": "Input should be 'abort'"})}, "does not know")):
        with engines({**answers, **absent}) as servers, pytest.raises(WeightSyncError, match=f"{said}.*{mode}.* Fix: abort"):
            WeightUpdate(clients(servers), "ipc", timeout_s=5, pause_mode=mode).begin()


def test_in_place_goes_on_where_running_requests_keep_the_cache(caplog):
    with engines({**engine_answers(), "/flush_cache": (400, {"message": "requests are running"})}) as servers:
        update = WeightUpdate(clients(servers), "ipc", timeout_s=5, pause_mode="in_place")
        update.begin()
        update.finish(3)
        assert servers[0].calls[0][2] == {"mode": "in_place"} and servers[0].paths[-1] == "/continue_generation"
        assert servers[0].paths.count("/flush_cache") == 1
    assert "prefixes computed with the old weights stay" in caplog.text
    caplog.clear()
    with engines(engine_answers()) as servers:
        update = WeightUpdate(clients(servers), "ipc", timeout_s=5, pause_mode="in_place")
        update.begin()
        update.finish(7)
        assert servers[0].paths.count("/flush_cache") == 1
    assert not caplog.records


def test_a_server_that_does_not_flush_beside_retracted_requests_is_told_from_a_slow_one():
    with engines({**engine_answers(), "/flush_cache": (400, {"message": "requests are waiting"})}) as servers:
        update = WeightUpdate(clients(servers), "ipc", timeout_s=1, pause_mode="retract")
        update.begin()
        with pytest.raises(WeightSyncError, match="(?s)engine 0.*requests are waiting.*0.5.17.*--update-weight-pause-mode abort"):
            update.finish(7)
        assert "/continue_generation" not in servers[0].paths


def test_first_failure_ends_the_waiting():
    over = threading.Event()

    def fail():
        raise EngineError("engine 1 is gone")

    try:
        with pytest.raises(EngineError, match="engine 1 is gone"):  # and no WaitTimeout about a, which waits on
            run_together({"a": lambda: over.wait(60), "b": fail}, timeout_s=30, who="driver", phase="p")
    finally:
        over.set()


def test_late_engine_is_named():
    import time

    with pytest.raises(WaitTimeout, match="driver waited 0 s for slow during sync. Last heard: done: quick"):
        run_together({"quick": lambda: 1, "slow": lambda: time.sleep(3)}, timeout_s=0.2, who="driver", phase="sync")


def test_results_come_by_name():
    assert run_together({"a": lambda: 1, "b": lambda: 2}, timeout_s=5, who="x", phase="y") == {"a": 1, "b": 2}


def test_the_driver_needs_no_torch():
    code = "import sys, slime_like.weight_sync.envelope; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
