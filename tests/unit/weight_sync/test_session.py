"""The order of a weight sync on every engine and every rank, and what stops it."""

# Covers slime_like.sglang_backend.adapter_client too.

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time

import pytest
from sglang_backend.fake_http import FakeServer, serve

from slime_like.config.observability import ObservabilityConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.config.transports import TRANSPORTS
from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.records import EngineEndpoint, SyncReceipt, WeightsRef
from slime_like.weight_sync.session import EngineSide, PublishOrder, abandon, run_session, version_directory
from slime_like.weight_sync.together import run_together

OK = (200, {"success": True})


def engine_answers(report_version=None) -> dict:
    """A fake engine's answers; it reports the version it was told, or `report_version`."""
    state = {"version": "default"}
    return {
        **dict.fromkeys(
            [
                "/pause_generation",
                "/flush_cache",
                "/begin_weight_update",
                "/end_weight_update",
                "/continue_generation",
                "/update_weights_from_disk",
            ],
            OK,
        ),
        "/update_weight_version": lambda body: (state.update(version=body["new_version"]), OK)[1],
        "/model_info": lambda body: (200, {"weight_version": report_version or state["version"]}),
    }


@contextlib.contextmanager
def engines(*answers: dict):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(answer)) for answer in answers]


def endpoints(servers: list[FakeServer]) -> tuple[EngineEndpoint, ...]:
    return tuple(EngineEndpoint(index=i, url=server.url) for i, server in enumerate(servers))


def order(servers: list[FakeServer], transport: str, *, version: int = 7, timeout_s: float = 5, **more) -> PublishOrder:
    return PublishOrder(
        weights=WeightsRef(version=version),
        endpoints=endpoints(servers),
        transport=transport,
        timeout_s=timeout_s,
        **more,
    )


class OneRank:
    """A trainer of one rank that sends nothing but says that it did; what is asked of it goes to `steps`."""

    def __init__(self, steps: list[str], num_tensors: int = 3):
        self._steps, self._num_tensors = steps, num_tensors

    def on_lead(self, phase, act, *, longest_s):
        self._steps.append(phase)
        act()

    def connect(self):
        self._steps.append("connect")

    def send(self, weights):
        self._steps.append(f"send {weights}")
        return SyncReceipt(
            weights=weights, transport="none", num_tensors=self._num_tensors, num_bytes=12, seconds=0.1, digest="0"
        )

    def prove(self, endpoints):
        self._steps.append("prove")
        return len(endpoints), 1


def test_a_whole_sync():
    """On the ranks and on the engines, in this order; the receipt has what was proven."""
    with engines(engine_answers(), engine_answers()) as servers:
        steps: list[str] = []
        receipt = run_session(order(servers, "ipc"), OneRank(steps))
        assert steps == ["begin", "connect", "send base@7", "prove", "finish"]
        for server in servers:
            assert server.paths == [
                "/pause_generation", "/begin_weight_update",
                "/end_weight_update", "/flush_cache", "/update_weight_version", "/model_info", "/continue_generation",
            ]  # fmt: skip
            assert server.calls[0][2] == {"mode": "abort"}
            assert server.calls[4][2]["new_version"] == "7"
        assert (receipt.version, receipt.engines_proven, receipt.tensors_unproven) == (
            7,
            2,
            1,
        ) and receipt.verify_seconds > 0


def test_a_folder_is_loaded_outside_of_a_session_and_compared_in_one():
    with engines(engine_answers()) as servers:
        steps: list[str] = []
        run_session(order(servers, "disk", directory="/w"), OneRank(steps))
        assert steps == ["connect", "send base@7", "begin", "load", "open for digests", "prove", "finish"]
        paths = [
            path
            for path in servers[0].paths
            if path in ("/update_weights_from_disk", "/begin_weight_update", "/end_weight_update")
        ]
        assert paths == ["/update_weights_from_disk", "/begin_weight_update", "/end_weight_update"]
        assert [body["model_path"] for _, path, body in servers[0].calls if path == "/update_weights_from_disk"] == [
            version_directory("/w", 7)
        ]


def test_adapters_are_loaded_beside_the_base_and_the_version_before(tmp_path):
    """Nothing pauses; what is two versions old goes, unless requests under way name it; and so does what an earlier
    attempt left under this name.
    """
    loaded = ["policy@4", "policy@5", "policy@6", "policy@7", "somebody@1"]
    models = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in loaded)]
    answers = engine_answers() | {
        "/v1/models": lambda body: (200, {"data": models}),
        "/load_lora_adapter": OK,
        "/unload_lora_adapter": OK,
    }
    with engines(answers) as servers:
        steps: list[str] = []
        adapters = dataclasses.replace(
            order(servers, "adapter", directory=str(tmp_path), compares_digests=False),
            weights=WeightsRef("policy", 7),
            in_use=frozenset({WeightsRef("policy", 4)}),
        )
        assert adapters.route == dataclasses.replace(adapters, weights=WeightsRef("policy", 8)).route
        assert adapters.route.in_use == frozenset()
        receipt = run_session(adapters, OneRank(steps))
        assert steps == ["connect", "send policy@7", "begin", "load", "finish"]
        assert [(path, body) for _, path, body in servers[0].calls if "lora" in path] == [
            ("/unload_lora_adapter", {"lora_name": "policy@5"}),
            ("/unload_lora_adapter", {"lora_name": "policy@7"}),
            ("/load_lora_adapter", {"lora_name": "policy@7", "lora_path": version_directory(str(tmp_path), 7)}),
        ]
        assert servers[0].paths[-2:] == ["/update_weight_version", "/model_info"]
        assert receipt.engines_proven == 0


def test_without_digests_a_folder_needs_no_session():
    with engines(engine_answers()) as servers:
        steps: list[str] = []
        assert (
            run_session(order(servers, "disk", directory="/w", compares_digests=False), OneRank(steps)).engines_proven
            == 0
        )
        assert steps == ["connect", "send base@7", "begin", "load", "finish"]
        assert "/begin_weight_update" not in servers[0].paths


def test_a_transport_that_needs_no_pause_stops_nothing(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "beside", dataclasses.replace(TRANSPORTS["ipc"], name="beside", needs_pause=False))
    with engines(engine_answers()) as servers:
        run_session(order(servers, "beside"), OneRank([]))
        assert servers[0].paths == [
            "/begin_weight_update",
            "/end_weight_update",
            "/flush_cache",
            "/update_weight_version",
            "/model_info",
        ]


def test_a_trainer_that_sent_nothing_leaves_engines_paused():
    with engines(engine_answers()) as servers:
        with pytest.raises(WeightSyncError, match="base@7: the trainer sent no tensor"):
            run_session(order(servers, "ipc"), OneRank([], num_tensors=0))
        assert servers[0].paths == ["/pause_generation", "/begin_weight_update"]


class SlowRank(OneRank):
    """Notes in `steps` whether an engine is paused while the trainer sends."""

    def __init__(self, steps: list[str], server):
        super().__init__(steps)
        self._server = server

    def send(self, weights):
        self._steps.append("paused" if "/pause_generation" in self._server.paths else "generating")
        return super().send(weights)


@pytest.mark.parametrize(("transport", "meanwhile"), [("disk", "generating"), ("broadcast", "paused")])
def test_engines_generate_while_a_folder_is_written(transport: str, meanwhile: str):
    with engines(engine_answers()) as servers:
        steps: list[str] = []
        run_session(order(servers, transport, directory="/w"), SlowRank(steps, servers[0]))
        assert meanwhile in steps
        assert [path for path in servers[0].paths if "generation" in path] == [
            "/pause_generation",
            "/continue_generation",
        ]


def test_a_folder_that_was_not_written_stops_no_engine():
    with engines(engine_answers()) as servers:
        with pytest.raises(WeightSyncError, match="sent no tensor"):
            run_session(order(servers, "disk", directory="/w"), OneRank([], num_tensors=0))
        assert servers[0].paths == []


def test_disk_needs_its_folder():
    with pytest.raises(WeightSyncError, match="folder.*--update-weight-disk-dir"):
        EngineSide(order([], "disk")).load()


def test_wrong_version_is_named_and_generation_stays_paused():
    with engines(engine_answers(), engine_answers(report_version="6")) as servers:
        with pytest.raises(
            WeightSyncError, match=f"weight version 7 was sent, but engine 1 at {servers[1].url} reports '6'"
        ):
            run_session(order(servers, "broadcast"), OneRank([]))
        assert all("/continue_generation" not in server.paths for server in servers)


def test_an_engine_that_cannot_be_reached_is_named_before_anything_is_sent():
    with engines(engine_answers()) as servers:
        with engines(engine_answers()) as gone:
            pass
        steps: list[str] = []
        with pytest.raises(EngineError, match="engine 1: POST .*pause_generation failed"):
            run_session(order(servers + gone, "ipc"), OneRank(steps))
        assert steps == ["begin"]


def test_abandon_closes_sessions_without_continuing_even_if_one_engine_is_gone(caplog):
    with engines(engine_answers()) as servers:
        with engines(engine_answers()) as gone:
            EngineSide(order(gone + servers, "ipc")).begin()
        abandon(endpoints(gone + servers))
        assert servers[0].paths == ["/pause_generation", "/begin_weight_update", "/end_weight_update"]
    assert "abandoned weight update: engine 0: POST" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        (404, {}),
        (400, {"success": False, "message": "no weight-update session is open; call begin_weight_update() first"}),
    ],
)
def test_abandon_says_nothing_of_an_engine_that_has_no_session_open(caplog, answer):
    with engines({"/end_weight_update": answer}) as servers:
        abandon(endpoints(servers))
        assert servers[0].paths == ["/end_weight_update"] and not caplog.records
    with engines({"/end_weight_update": (400, {"success": False, "message": "it is broken"})}) as servers:
        abandon(endpoints(servers))
    assert "it is broken" in caplog.text


def test_engine_without_pause_gets_its_requests_aborted():
    answers = engine_answers()
    del answers["/pause_generation"]
    with engines({**answers, "/abort_request": OK}) as servers:
        EngineSide(order(servers, "ipc")).begin()
        assert servers[0].paths[:2] == ["/pause_generation", "/abort_request"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_mode_that_the_engine_does_not_know_is_refused(mode):
    answers = engine_answers()
    del answers["/pause_generation"]
    for absent, said in (
        ({}, "cannot pause"),
        ({"/pause_generation": (422, {"detail": "Input should be 'abort'"})}, "does not know"),
    ):
        with (
            engines({**answers, **absent}) as servers,
            pytest.raises(WeightSyncError, match=f"{said}.*{mode}.* Fix: abort"),
        ):
            EngineSide(order(servers, "ipc", pause_mode=mode)).begin()


def test_in_place_goes_on_where_running_requests_keep_the_cache(caplog):
    with engines({**engine_answers(), "/flush_cache": (400, {"message": "requests are running"})}) as servers:
        run_session(order(servers, "ipc", pause_mode="in_place"), OneRank([]))
        assert servers[0].calls[0][2] == {"mode": "in_place"} and servers[0].paths[-1] == "/continue_generation"
        assert servers[0].paths.count("/flush_cache") == 1
    assert "prefixes computed with the old weights stay" in caplog.text
    caplog.clear()
    with engines(engine_answers()) as servers:
        run_session(order(servers, "ipc", pause_mode="in_place"), OneRank([]))
        assert servers[0].paths.count("/flush_cache") == 1
    assert not caplog.records


def test_a_server_that_does_not_flush_beside_retracted_requests_is_told_from_a_slow_one():
    with engines({**engine_answers(), "/flush_cache": (400, {"message": "requests are waiting"})}) as servers:
        with pytest.raises(
            WeightSyncError, match="(?s)engine 0.*requests are waiting.*0.5.17.*--update-weight-pause-mode abort"
        ):
            run_session(order(servers, "ipc", timeout_s=1, pause_mode="retract"), OneRank([]))
        assert "/continue_generation" not in servers[0].paths


def test_an_order_as_the_flags_say():
    sync = SyncConfig(update_weight_timeout_s=9.0, update_weight_pause_mode="retract", verify_weight_sync="full")
    config = RunConfig(sync=sync, observability=ObservabilityConfig(run_dir="/run"))
    first = PublishOrder.of(config, "delta", endpoints([]), WeightsRef(version=3))
    assert (first.timeout_s, first.pause_mode, first.directory) == (9.0, "retract", "/run/weights")
    assert first.compares_digests and first.finds_unsent
    probed = dataclasses.replace(
        config, sync=dataclasses.replace(sync, update_weight_disk_dir="/shared", verify_weight_sync="probe")
    )
    second = PublishOrder.of(probed, "disk", endpoints([]), WeightsRef(version=4))
    assert second.directory == "/shared" and not second.compares_digests and not second.finds_unsent
    assert first.route == dataclasses.replace(first, weights=WeightsRef(version=8)).route != second.route


def test_a_rank_is_waited_for_longer_than_all_of_its_steps():
    """begin, connect, send twice, load, open, verify, three of finish.

    Those in turn once more for each further source.
    """
    one = order([], "disk", timeout_s=10)
    assert one.longest_s(1) > 10 * 10 and one.longest_s(3) >= one.longest_s(1) + 2 * 2 * 10


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
    with pytest.raises(WaitTimeout, match="driver waited 0 s for slow during sync. Last heard: done: quick"):
        run_together({"quick": lambda: 1, "slow": lambda: time.sleep(3)}, timeout_s=0.2, who="driver", phase="sync")


def test_results_come_by_name():
    assert run_together({"a": lambda: 1, "b": lambda: 2}, timeout_s=5, who="x", phase="y") == {"a": 1, "b": 2}


def test_the_driver_needs_no_torch():
    code = "import sys, slime_like.weight_sync.session; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cards_are_for_a_transport_that_gains_by_them():
    engines = (EngineEndpoint(index=0, url="http://127.0.0.1:1", tp_size=2),)
    by_card = PublishOrder.of(RunConfig(), "ipc", engines, WeightsRef(), cards=((0, 1),))
    assert by_card.cards == by_card.route.cards == ((0, 1),)
    assert PublishOrder.of(RunConfig(), "disk", engines, WeightsRef(), cards=((0, 1),)).cards == ()
    # one source a card takes its turn, however many stages there are
    assert by_card.longest_s(1) > PublishOrder.of(RunConfig(), "ipc", engines, WeightsRef()).longest_s(1)
