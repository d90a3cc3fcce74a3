"""EngineClient against a fake server: what it sends, what it says when something is wrong."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sglang_backend.fake_http import serve

from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient, EngineHttpError
from slime_like.utils.net import free_port, wait_until

OK = (200, {"success": True, "message": "Success"})


def client_of(url: str, key: str | None = None, timeout_s: float = 5.0) -> EngineClient:
    return EngineClient(EngineEndpoint(index=3, url=url, api_key=key), timeout_s)


def test_error_names_engine_request_status_and_answer():
    with (
        serve({"/pause_generation": (500, "it broke " + "x" * 2000)}) as server,
        pytest.raises(EngineHttpError) as caught,
    ):
        client_of(server.url).pause_generation("abort")
    text = str(caught.value)
    assert f"engine 3: POST {server.url}/pause_generation answered 500: it broke xxx" in text
    assert len(text) < 700
    assert caught.value.status == 500
    assert pickle.loads(pickle.dumps(caught.value)).status == 500


def test_key_is_sent_and_a_wrong_one_is_an_error_without_the_key_in_it():
    with serve({"/model_info": (200, {"weight_version": "4"})}, api_key="right") as server:
        assert client_of(server.url, "right").weight_version() == "4"
        with pytest.raises(EngineError, match="401.*API key") as caught:
            client_of(server.url, "secret-wrong").weight_version()
    assert "secret-wrong" not in str(caught.value)


def test_a_key_that_no_header_takes_is_an_error_without_the_key_in_it():
    key = "\n".join(["sec" + "ret"] * 2)
    with (
        serve({"/model_info": (200, {})}) as server,
        pytest.raises(EngineHttpError, match="one line") as caught,
    ):
        client_of(server.url, key).model_info()
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_a_redirect_is_an_error():
    """Followed, a POST would become a GET, and the key go where nobody said."""
    with (
        serve({"/pause_generation": (302, "over there")}) as server,
        pytest.raises(EngineHttpError, match="302") as caught,
    ):
        client_of(server.url).pause_generation("abort")
    assert caught.value.status == 302


def test_certificates_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(EngineError, match=r"none\.pem cannot be used: .*No such file.*REQUESTS_CA_BUNDLE"):
        client_of("https://127.0.0.1:1")
    client_of("http://127.0.0.1:1")  # needs none


def test_refusal_in_a_good_answer_is_an_error():
    refusal = (200, {"success": False, "message": "no such folder"})
    with serve({"/update_weights_from_disk": refusal}) as server, pytest.raises(EngineError, match="no such folder"):
        client_of(server.url).update_weights_from_disk("/nowhere")


def test_nobody_there():
    url = f"http://127.0.0.1:{free_port()}"
    assert not client_of(url).health()
    with pytest.raises(EngineError, match=f"engine 3: GET {url}/server_info failed"):
        client_of(url).server_info()


def test_late_answer_is_a_timeout_that_names_the_request():
    late = "engine 3.*POST /continue_generation"
    with (
        serve({"/continue_generation": lambda body: (time.sleep(1.0), OK)[1]}) as server,
        pytest.raises(WaitTimeout, match=late),
    ):
        client_of(server.url, timeout_s=0.2).continue_generation()


def test_flush_is_tried_again_until_requests_have_ended():
    left = [2]

    def flush(body):
        left[0] -= 1
        return (400, "requests are running") if left[0] >= 0 else (200, "flushed")

    with serve({"/flush_cache": flush}) as server:
        client_of(server.url).flush_cache()
        assert len(server.calls) == 3
        left[0] = 10**6
        with pytest.raises(WaitTimeout, match="flush cache.*requests are running"):
            client_of(server.url).flush_cache(deadline_s=0.3)


def test_older_names_of_information():
    with serve({"/get_server_info": (200, {"tp_size": 2})}) as server:
        assert client_of(server.url).server_info() == {"tp_size": 2}


def test_session_is_used_where_there_is_one():
    with serve({"/begin_weight_update": OK, "/end_weight_update": OK}) as server:
        client = client_of(server.url)
        client.begin_weight_update()
        client.end_weight_update()
        client.end_weight_update()
        assert server.paths == ["/begin_weight_update", "/end_weight_update"]
    with serve({}) as server:
        client = client_of(server.url)
        client.begin_weight_update()
        client.end_weight_update()
        assert server.paths == ["/begin_weight_update"]


def test_session_left_open_by_a_failed_sync_is_closed_first():
    answers = [
        (400, {"success": False, "message": "a weight-update session is already open; call end_weight_update() first"}),
        OK,
    ]
    with serve({"/begin_weight_update": lambda body: answers.pop(0), "/end_weight_update": OK}) as server:
        client_of(server.url).begin_weight_update()
        assert server.paths == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_engine_without_weight_versions_is_refused():
    with (
        serve({"/model_info": (200, {"model_path": "m"})}) as server,
        pytest.raises(EngineError, match="too old for weight sync"),
    ):
        client_of(server.url).weight_version()


@contextlib.contextmanager
def counting_server() -> Iterator[tuple[EngineEndpoint, list, list]]:
    """(a server that keeps connections, each that was opened, each that was closed)."""
    opened, closed = [], []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            opened.append(self.client_address)
            super().setup()

        def finish(self):
            super().finish()
            closed.append(self.client_address)

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield EngineEndpoint(index=0, url=f"http://127.0.0.1:{server.server_address[1]}"), opened, closed
    finally:
        server.shutdown()
        server.server_close()


def test_connections_are_kept_between_threads_but_not_for_long():
    with counting_server() as (endpoint, opened, _):
        client = EngineClient(endpoint, timeout_s=5, keep_s=60.0)
        for _ in range(3):
            thread = threading.Thread(target=client.models)
            thread.start()
            thread.join()
        assert len(opened) == 1
        brief = EngineClient(endpoint, timeout_s=5, keep_s=0.01)
        for _ in range(2):
            brief.models()
            time.sleep(0.05)  # the server might have closed it
        assert len(opened) == 3
        barrier = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:  # never two requests on one
            list(pool.map(lambda _: (barrier.wait(5), [client.models() for _ in range(20)]), range(2)))
        assert len(opened) <= 4


def test_a_dropped_client_leaves_no_connection():
    with counting_server() as (endpoint, opened, closed):
        EngineClient(endpoint, timeout_s=5).models()
        gc.collect()
        wait_until(
            lambda: None if closed == opened else str(closed), deadline_s=5, who="test", whom="server", phase="close"
        )
