"""The scripted engine's faults, and that it leaves nothing behind. That it answers as SGLang does: tests/contract."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import requests

from slime_like.errors import EngineError
from slime_like.testing.scripted_engine import Fault, ScriptedEngine


def script(prompt):
    return [*prompt, 2], [-0.25] * (len(prompt) + 1)


def generate(engine, ids=(5, 6), rid=None, **params):
    body = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, **({"rid": rid} if rid else {})}
    return requests.post(f"{engine.url}/generate", json=body, timeout=10)


def test_it_answers_by_the_script_and_keeps_what_was_asked():
    with ScriptedEngine(script) as engine:
        answer = generate(engine).json()
        assert answer["output_ids"] == [5, 6, 2] and answer["text"] == "5 6 2"
        assert answer["meta_info"]["output_token_logprobs"] == [[-0.25, 5, None], [-0.25, 6, None], [-0.25, 2, None]]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert engine.requests[0]["input_ids"] == [5, 6]


def test_stop_tokens_and_length_cut_the_script():
    with ScriptedEngine(script, stop_token_ids=[2]) as engine:
        assert generate(engine, max_new_tokens=3).json()["text"] == "5 6"  # the stop token is not shown
        stopped = generate(engine, stop_token_ids=[5]).json()
        assert stopped["output_ids"] == [5] and stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 5}
        cut = generate(engine, max_new_tokens=2).json()
        assert cut["output_ids"] == [5, 6] and cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
        assert len(cut["meta_info"]["output_token_logprobs"]) == 2


def test_faults_come_in_order_and_then_all_is_well():
    with ScriptedEngine(
        script,
        faults=[Fault(status=503), None, Fault(drop=True), Fault(abort=1), Fault(body="nonsense"), Fault(delay_s=0.2)],
    ) as engine:
        assert generate(engine).status_code == 503
        assert generate(engine).ok
        with pytest.raises(requests.ConnectionError):
            generate(engine)
        aborted = generate(engine).json()
        assert aborted["output_ids"] == [5] and aborted["meta_info"]["finish_reason"]["type"] == "abort"
        assert generate(engine).text == "nonsense"
        start = time.monotonic()
        assert generate(engine).ok and time.monotonic() - start >= 0.2
        assert generate(engine).ok


@pytest.mark.parametrize("how", [{"abort_all": True}, {"rid": "mine"}])
def test_abort_ends_a_waiting_request(how):
    with ScriptedEngine(script, faults=[Fault(delay_s=30)]) as engine:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(generate(engine, rid="mine").json()))
        thread.start()
        while not engine.requests:
            time.sleep(0.01)
        requests.post(f"{engine.url}/abort_request", json={"rid": "another"}, timeout=5)
        time.sleep(0.05)
        assert thread.is_alive()
        requests.post(f"{engine.url}/abort_request", json=how, timeout=5)
        thread.join(timeout=5)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_paused_engine_answers_after_it_continues():
    with ScriptedEngine(script) as engine:
        requests.post(f"{engine.url}/pause_generation", json={"mode": "retract"}, timeout=5)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(generate(engine).json()))
        thread.start()
        time.sleep(0.1)
        assert not answers
        requests.post(f"{engine.url}/continue_generation", json={}, timeout=5)
        thread.join(timeout=5)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "stop"
        assert engine.calls == [("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})]


def test_it_listens_on_loopback_only_and_a_taken_port_is_named():
    with ScriptedEngine(script) as engine:
        port = int(engine.url.rpartition(":")[2])
        assert engine.url.startswith("http://127.0.0.1:")
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}"):
            ScriptedEngine(script, port=port).start()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # closed at the end of the block


def test_closing_frees_waiting_clients():
    engine = ScriptedEngine(script, faults=[Fault(delay_s=60)]).start()
    outcome = []

    def ask():
        try:
            outcome.append(generate(engine).status_code)
        except requests.RequestException as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not engine.requests:
        time.sleep(0.01)
    start = time.monotonic()
    engine.close()
    engine.close()
    thread.join(timeout=5)
    assert outcome and time.monotonic() - start < 5
