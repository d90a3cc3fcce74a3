"""One question over HTTP: what is asked again, what is not, and what was heard last."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from slime_like.rollout.asking import BUSY, NoAnswer, ask


def run(*answers, tries: int = 5, timeout_s: float = 30.0, **options) -> tuple[str, int]:
    """(the text or the failure, how often was asked); an answer is (text, status) or what is raised."""
    asked = 0

    async def exchange() -> tuple[str, int]:
        nonlocal asked
        answer = answers[min(asked, len(answers) - 1)]
        asked += 1
        if answer == "hang":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> str:
        try:
            return await ask(exchange, slots=asyncio.Semaphore(1), tries=tries, timeout_s=timeout_s, **options)
        except NoAnswer as error:
            return f"{error.kind}: {error.last}"

    return asyncio.run(main()), asked


def test_the_first_answer_is_taken():
    assert run(("yes", 200)) == ("yes", 1)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_what_may_pass_is_asked_again(status: int):
    assert run(("busy", status), ("yes", 200)) == ("yes", 2)


@pytest.mark.parametrize("status", sorted(BUSY))
def test_a_busy_server_is_asked_again_only_where_the_caller_says_so(status: int):
    assert run(("busy", status), ("yes", 200), passing=BUSY) == ("yes", 2)
    assert run(("busy", status), ("yes", 200)) == (f"refused: HTTP {status}: busy", 1)


@pytest.mark.parametrize("failure", [aiohttp.ClientConnectionError("gone"), ConnectionResetError("reset")])
def test_a_broken_connection_is_asked_again(failure: Exception):
    assert run(failure, ("yes", 200)) == ("yes", 2)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final(status: int):
    assert run(("bad request", status)) == (f"refused: HTTP {status}: bad request", 1)


def test_tries_are_bounded():
    assert run(("down", 503), ("still down", 503), tries=2) == ("tries: HTTP 503: still down", 2)


@pytest.mark.slow
def test_the_deadline_counts_over_all_tries():
    assert run(("busy", 503), "hang", timeout_s=1.0) == ("deadline: HTTP 503: busy", 2)
    assert run("hang", timeout_s=0.05) == ("deadline: nothing", 1)
