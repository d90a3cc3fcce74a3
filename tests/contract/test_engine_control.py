"""Starting, stopping and steering a real engine."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from slime_like.errors import EngineError
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from slime_like.utils.guard import group_members
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import FLAGS, largest_difference, options, prompt, sync

LONG = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}


class Running:
    """A generation in a thread; entered once it has begun."""

    def __init__(self, client: EngineClient):
        self._client, self.answer = EngineClient(client.endpoint, timeout_s=60), None

    def __enter__(self) -> Running:
        self._thread = threading.Thread(target=lambda: setattr(self, "answer", self._client.generate(prompt(5), LONG)))
        self._thread.start()
        time.sleep(0.3)  # 400 tokens take at least 0.7 s
        assert self.answer is None
        return self

    def __exit__(self, *exc) -> None:
        self._thread.join()


def test_facts(tp1, tp2):
    assert tp1.client.server_info()["tp_size"] == 1
    assert tp2.client.server_info()["tp_size"] == 2
    assert tp1.client.health()


def test_abort_returns_what_there_is(served):
    with Running(served.client) as running:
        served.client.abort_all()
    assert running.answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(running.answer["output_ids"]) < 400


def test_pausing_to_abort(served):
    with Running(served.client) as running:
        served.client.pause_generation("abort")
    assert running.answer["meta_info"]["finish_reason"]["type"] == "abort"
    start = time.monotonic()
    assert served.client.health() and time.monotonic() - start < 2  # a paused engine is still a healthy one
    served.client.flush_cache()
    served.client.continue_generation()
    assert len(served.client.generate(prompt(1), {"max_new_tokens": 3, "ignore_eos": True})["output_ids"]) == 3


def test_a_retracted_request_goes_on_with_the_new_weights(served, models):
    publisher = make_publisher(options([served], "ipc"))
    with Running(served.client) as running:
        served.client.pause_generation("retract")
        served.client.flush_cache()
        served.client.begin_weight_update()
        publisher.send(iter(models[2].state_dict().items()), served.version + 1)
        served.client.end_weight_update()
        served.client.continue_generation()
    publisher.close()
    assert len(running.answer["output_ids"]) == 400
    assert running.answer["meta_info"]["num_retractions"] >= 1
    assert largest_difference(served.client, models[2]) < 1e-5


def test_cached_prefixes_do_not_survive_a_sync(served, models):
    tokens = prompt(9, length=200)
    for _ in range(2):
        served.client.generate(tokens, {"max_new_tokens": 1})
    assert served.client.generate(tokens, {"max_new_tokens": 1})["meta_info"]["cached_tokens"] > 100
    publisher = make_publisher(options([served], "ipc"))
    sync([served], models[2], [publisher], "ipc")
    publisher.close()
    assert served.client.generate(tokens, {"max_new_tokens": 1})["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("key", [None, "wrong"])
def test_no_request_without_the_key(tp1, key):
    stranger = EngineClient(dataclasses.replace(tp1.engine.endpoint, api_key=key))
    reads = [stranger.model_info, lambda: stranger.generate([5], {})]
    writes = [stranger.abort_all, stranger.begin_weight_update, lambda: stranger.pause_generation("abort")]
    for request in reads + writes:
        with pytest.raises(EngineHttpError, match="401") as caught:
            request()
        assert caught.value.status == 401


def test_key_is_neither_in_the_log_nor_on_a_command_line(tp1):
    key = tp1.engine.endpoint.api_key
    with open(tp1.engine.spec.log_path) as file:
        assert key not in file.read()
    for pid in group_members(tp1.engine.pid):
        with open(f"/proc/{pid}/cmdline") as file:
            assert key not in file.read()


def test_binds_its_own_address_only(tp1):
    """The HTTP port is on loopback alone."""
    port = int(tp1.client.url.rpartition(":")[2])
    with open("/proc/net/tcp") as file:
        listening = [
            line.split()[1]
            for line in file.readlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
        ]
    assert listening == [f"0100007F:{port:04X}"]


def test_idle_engine_costs_nothing(served):
    def cpu_ticks() -> int:
        total = 0
        for pid in group_members(served.engine.pid):
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    time.sleep(0.5)
    before = cpu_ticks()
    time.sleep(2.0)
    assert (cpu_ticks() - before) / os.sysconf("SC_CLK_TCK") / 2.0 < 0.2


def test_bad_model_path_ends_with_the_log(tmp_path):
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        launch_engine(
            EngineSpec(
                index=0, model_path=str(tmp_path / "no-model"), log_path=str(tmp_path / "log"), extra_flags=FLAGS
            ),
            timeout_s=60,
        )
    assert time.monotonic() - start < 15
    assert (
        "no-model" in str(caught.value) and "ended with status" in str(caught.value) and "OSError" in str(caught.value)
    )


def test_taken_port(tp1, model_folder, tmp_path):
    port = int(tp1.client.url.rpartition(":")[2])
    with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is taken"):
        launch_engine(
            EngineSpec(index=0, model_path=str(model_folder), port=port, log_path=str(tmp_path / "log")), timeout_s=60
        )


def test_nothing_survives_when_the_process_that_started_it_is_killed(model_folder, tmp_path, no_process_left):
    arguments = {
        "index": 0,
        "model_path": str(model_folder),
        "dtype": "float32",
        "log_path": str(tmp_path / "log"),
        "extra_flags": FLAGS,
    }
    code = f"""
import time
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
engine = launch_engine(EngineSpec(**{arguments!r}), timeout_s=60)
print(engine.pid, engine.endpoint.url, flush=True)
time.sleep(120)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid, url = parent.stdout.readline().split()
        assert len(group_members(int(pid))) >= 3
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 10
        while group_members(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert group_members(int(pid)) == []
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    finally:
        parent.kill()
        parent.stdout.close()
