"""Whether a server hangs: silence that lasts, several missed questions, and one more before the judgment."""

from __future__ import annotations

import threading
import time

from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.hang_watch import EngineHangWatch, HangWatch
from slime_like.utils.net import free_port
from tests.unit.sglang_backend.fake_http import serve


class Server:
    """Answers while `well`; each question is counted."""

    def __init__(self):
        self.well, self.questions, self.thread = True, 0, threading.get_ident()
        self.asked_by_us = 0

    def ask(self, seconds: float) -> None:
        self.questions += 1
        self.asked_by_us += threading.get_ident() == self.thread
        if not self.well:
            time.sleep(seconds)
            raise EngineError("no answer")


def silence(watch: HangWatch, seconds: float = 5.0) -> float | None:
    """What the watch says in the end."""
    deadline = time.monotonic() + seconds
    while (silent := watch.silent_s()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return silent


def test_a_server_that_answers_does_not_hang():
    server = Server()
    watch = HangWatch(server.ask, timeout_s=0.2, name="it")
    assert silence(watch, 1.0) is None and server.questions > 3
    watch.stop()


def test_silence_that_lasts_is_a_hang_and_one_more_question_is_asked_before():
    server = Server()
    watch = HangWatch(server.ask, timeout_s=0.4, name="it")
    server.well = False
    silent = silence(watch)
    assert silent is not None and 0.4 <= silent < 2.0
    assert server.asked_by_us == 1
    watch.stop()


def test_who_is_well_again_by_the_last_question_does_not_hang():
    """A scheduler that was busy longer than the deadline, and has just come back."""
    server = Server()
    watch = HangWatch(server.ask, timeout_s=0.4, name="it")
    server.well = False
    while watch._missed < 3 or time.monotonic() - watch._last_answer < 0.5:
        time.sleep(0.01)
    server.well = True
    assert watch.silent_s() is None
    watch.stop()


def test_one_long_gap_without_questions_is_no_hang():
    """As when train.py itself was stopped meanwhile: nobody has missed anything."""
    server = Server()
    watch = HangWatch(server.ask, timeout_s=0.2, name="it")
    watch.stop()
    time.sleep(0.6)
    assert watch.silent_s() is None and server.asked_by_us == 0


def judgment(watch: EngineHangWatch, seconds: float = 10.0) -> str | None:
    deadline = time.monotonic() + seconds
    while (said := watch.judgment()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.stop()
    return said


def test_an_engine_whose_scheduler_is_silent_is_told_from_one_that_is_silent_altogether():
    silent = threading.Event()
    answers = {"/model_info": (200, {}), "/server_info": lambda body: (200 if not silent.wait(3.0) else 500, {})}
    with serve(answers) as half:
        watch = EngineHangWatch(EngineEndpoint(index=3, url=half.url), timeout_s=0.8)
        said = judgment(watch)
        silent.set()
    assert said is not None and said.startswith(f"engine 3 at {half.url} hangs: no answer to /server_info for ")
    assert "from its scheduler, though its HTTP server answers" in said
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    said = judgment(EngineHangWatch(EngineEndpoint(index=4, url=nobody), timeout_s=0.4))
    assert said is not None and "from its HTTP server; it is ended" in said


def test_an_answer_of_whatever_kind_is_one():
    with serve({"/server_info": (500, "it broke")}) as fake:
        watch = EngineHangWatch(EngineEndpoint(index=0, url=fake.url), timeout_s=0.2)
        assert judgment(watch, 1.0) is None and len(fake.calls) > 3
