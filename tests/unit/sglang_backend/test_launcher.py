"""How an engine is started, and what is said when it cannot be; the server is a stand-in."""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest

from slime_like.config.quantisation import SCHEMES, engine_flags
from slime_like.errors import EngineError, WaitTimeout
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import (
    EngineSpec,
    _check_second_update,
    _environment,
    _server_argv,
    launch_engine,
)

# Answers /health to everybody and /model_info to whoever has the key from the --config file.
FAKE = """
import http.server, json, os, sys, time
options = {text.split("=")[0]: text.split("=")[-1] for text in sys.argv[1:]}
config = sys.argv[sys.argv.index("--config") + 1]
mode = os.stat(config).st_mode & 0o777
key = open(config).read().split('"')[1]
print("arguments", sys.argv[1:], "mode", oct(mode), "key", key, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = self.path == "/health" or self.headers.get("Authorization") == "Bearer " + key
        self.send_response(200 if good else 401); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


def spec(tmp_path, code: str, **more) -> EngineSpec:
    return EngineSpec(
        index=5,
        model_path="/models/m",
        log_path=f"{tmp_path}/logs/engine.log",
        command=(sys.executable, "-c", code),
        **more,
    )


def test_start_use_and_close(tmp_path, no_process_left):
    engine = launch_engine(spec(tmp_path, FAKE), timeout_s=20)
    key = engine.endpoint.api_key
    assert key and len(key) >= 32 and key not in repr(engine.endpoint)
    assert EngineClient(engine.endpoint).model_info() == {}
    assert engine.poll() is None
    engine.check()
    with open(f"/proc/{engine.pid}/cmdline") as file:
        assert key not in file.read()
    with open(engine.spec.log_path) as file:
        log = file.read()
    assert "mode 0o600 key ***" in log and key not in log
    engine.close()
    engine.close()
    assert engine.poll() is not None
    assert not EngineClient(engine.endpoint).health()


def test_engine_that_ends_at_start_is_reported_at_once_with_its_log(tmp_path):
    code = "print('line 1'); print('OSError: no such model'); raise SystemExit(7)"
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        launch_engine(spec(tmp_path, code), timeout_s=60)
    assert time.monotonic() - start < 5
    assert "engine 5 (/models/m, http://127.0.0.1:" in str(caught.value)
    assert "status 7" in str(caught.value) and str(caught.value).endswith("line 1\nOSError: no such model")


@pytest.mark.slow
def test_engine_that_never_becomes_healthy(tmp_path, no_process_left):
    with pytest.raises(WaitTimeout, match="launcher waited 1 s for engine 5 .*during start") as caught:
        launch_engine(spec(tmp_path, "import time; print('loading', flush=True); time.sleep(60)"), timeout_s=1.0)
    assert "loading" in str(caught.value)


def test_taken_port_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"engine 5: port {port} on 127.0.0.1 is taken"):
            launch_engine(spec(tmp_path, FAKE, port=port), timeout_s=5)


def test_command_that_is_not_there(tmp_path):
    broken = EngineSpec(index=5, model_path="m", log_path=f"{tmp_path}/log", command=("/no/such/python",))
    with pytest.raises(EngineError, match="engine 5 .*could not be started.*no/such/python"):
        launch_engine(broken, timeout_s=5)


def test_another_server_on_our_port_is_not_taken_for_ours(tmp_path, no_process_left):
    other = FAKE.replace("key = open", "key = 'another' or open")
    with pytest.raises(EngineError, match="401"):
        launch_engine(spec(tmp_path, other), timeout_s=20)


def test_user_flags_win_over_defaults(tmp_path):
    flags = {"max_total_tokens": "99", "attention_backend": "flex", "custom_weight_loader": ["mine.load"]}
    engine = spec(tmp_path, "", context_length=512, dtype="float32", extra_flags=flags)
    argv = _server_argv(engine, port=1, cuda=False)
    assert [a for a in argv if a.startswith(("--max-total-tokens", "--attention-backend"))] == [
        "--max-total-tokens=99",
        "--attention-backend=flex",
    ]
    assert {
        "--model-path=/models/m",
        "--port=1",
        "--tp-size=1",
        "--context-length=512",
        "--dtype=float32",
        "--device=cpu",
        "--sleep-on-idle",
    } <= set(argv)
    at = argv.index("--custom-weight-loader")
    assert argv[at + 1 : at + 3] == ["mine.load", "slime_like.weight_sync.in_engine.shm_loader.load"]


def test_log_level_is_ours_unless_sglang_has_one_of_its_own(tmp_path):
    def levels(**kwargs):
        return [
            text
            for text in _server_argv(spec(tmp_path, "", **kwargs), port=1, cuda=False)
            if text.startswith("--log-level")
        ]

    assert levels() == []
    assert levels(log_level="debug") == ["--log-level=debug"]
    assert levels(log_level="debug", extra_flags={"log_level": "error"}) == ["--log-level=error"]


def test_a_trainer_on_the_same_gpus_is_no_foreign_process(tmp_path, monkeypatch):
    """SGLang would end where the cards' free memory differs by a tenth. 0.5.17 copies the older variable, which means
    the opposite, over the newer one.
    """
    name, older = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(older, "1")
    shared = _environment(spec(tmp_path, "", shares_gpus=True), cuda=True)
    assert shared[name] == "false" and older not in shared
    for other in (
        _environment(spec(tmp_path, ""), cuda=True),
        _environment(spec(tmp_path, "", shares_gpus=True), cuda=False),
    ):
        assert name not in other and other[older] == "1"


def test_the_share_that_the_plan_derives_reaches_the_engine(tmp_path):
    argv = _server_argv(spec(tmp_path, "", extra_flags={"mem_fraction_static": "0.873"}), port=1, cuda=True)
    assert "--mem-fraction-static=0.873" in argv


def test_gpus_and_cpu_cores(tmp_path):
    engine = spec(tmp_path, "", tp_size=2, gpu_ids=(2, 3), memory_saver=True)
    assert _environment(engine, cuda=True)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--enable-memory-saver" in _server_argv(engine, port=1, cuda=True)
    assert "--device=cpu" not in _server_argv(engine, port=1, cuda=True)
    on_cpu = _environment(engine, cuda=False)
    cores = [int(core) for core in on_cpu["SGLANG_CPU_OMP_THREADS_BIND"].split("|")]
    assert len(cores) == 2 and set(cores) <= os.sched_getaffinity(0)
    assert on_cpu["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("name", "goes"), [("int8", False), ("fp8", True), ("fp8-per-tensor", True)])
def test_eight_bits_that_cuda_engines_take_only_once_are_refused(tmp_path, name, goes):
    """By the source of the SGLang that is installed: 0.5.23."""
    quantised = spec(tmp_path, "", extra_flags=engine_flags(SCHEMES[name], {}))
    if goes:
        _check_second_update(quantised)
        return
    with pytest.raises(EngineError, match=r"engine 5: .*second weight sync.*--rollout-quantization fp8"):
        _check_second_update(quantised)
