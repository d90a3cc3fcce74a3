"""A reward server as users have it: its answers become rewards, and each way of failing is told
with the sample's name.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from slime_like.config.reward import RewardConfig
from slime_like.errors import RewardError
from slime_like.rollout.rewards.scorer import RewardScorer
from tests.unit.rollout.rewards.test_scorer import PROMPT, make_sample


class Server:
    """Answers POST /rm by a script; remembers what it was asked and how many requests it had at a time."""

    def __init__(self, *answers, pause_s: float = 0.0):
        self.answers, self.pause_s = list(answers), pause_s
        self.asked: list[dict] = []
        self.most, self._now = 0, 0

    async def handle(self, request: web.Request) -> web.Response:
        self._now += 1
        self.most = max(self.most, self._now)
        self.asked.append(await request.json())
        status, text = self.answers[min(len(self.asked), len(self.answers)) - 1]
        await asyncio.sleep(self.pause_s)
        self._now -= 1
        return web.Response(status=status, text=text)


def ask(server: Server, *samples, port: int | None = None, **options) -> list[float]:
    """The samples' rewards, or the error. port: of a server that is not ours."""

    async def run():
        app = web.Application()
        app.router.add_post("/rm", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        config = RewardConfig(
            rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port or runner.addresses[0][1]}/rm", **options
        )
        assert config.problems() == []
        scorer = RewardScorer(config, None, None)
        try:
            return [
                sample.reward
                for sample in await asyncio.gather(
                    *(scorer.score(sample, PROMPT) for sample in samples or [make_sample()])
                )
            ]
        finally:
            await scorer.close()
            await runner.cleanup()

    return asyncio.run(run())


def test_prompt_response_and_label_are_sent_and_a_number_comes_back():
    server = Server((200, "0.25"), (200, "1"))
    assert sorted(ask(server, make_sample("six"), make_sample("seven", label={"gold": [42]}))) == [0.25, 1.0]
    assert sorted(server.asked, key=str) == sorted(
        [
            {"prompt": "What is 6 x 7?", "response": "six", "label": "42"},
            {"prompt": "What is 6 x 7?", "response": "seven", "label": {"gold": [42]}},
        ],
        key=str,
    )


def test_an_object_needs_a_key_and_a_label_none():
    assert ask(Server((200, '{"score": 0.5, "why": "short"}')), make_sample(label=None), reward_key="score") == [0.5]


def test_what_may_pass_is_asked_again():
    server = Server((503, "loading"), (429, "busy"), (200, "2"))
    assert ask(server) == [2.0] and len(server.asked) == 3


def test_no_more_requests_at_a_time_than_allowed():
    server = Server((200, "1"), pause_s=0.05)
    assert ask(server, *[make_sample()] * 9, rm_concurrency=3) == [1.0] * 9
    assert server.most == 3


@pytest.mark.parametrize(
    ("answers", "options", "message", "tries"),
    [
        (
            [(400, "no such field: prompt")],
            {},
            "refused the sample: HTTP 400: no such field: prompt: prompt 7, sample 2",
            1,
        ),
        (
            [(500, "out of memory")],
            {"rm_retries": 2},
            r"failed 2 times \(--rm-retries\). Last: HTTP 500: out of memory: prompt 7, sample 2",
            2,
        ),
        ([(200, "NaN")], {}, "gave nan, which is no finite number: prompt 7, sample 2", 1),
        ([(200, '"0.5"')], {}, "gave '0.5', which is no finite number", 1),
        ([(200, "null")], {}, "gave None, which is no finite number", 1),
        ([(200, "<html>")], {}, "gave no JSON: '<html>'", 1),
        ([(200, '{"score": 1}')], {}, r"gave a dict with the keys \['score'\]. Fix: name one with --reward-key", 1),
    ],
)
def test_each_failure_names_the_server_and_the_sample(answers, options, message, tries):
    server = Server(*answers)
    with pytest.raises(RewardError, match=rf"reward server http://127.0.0.1:\d+/rm {message}"):
        ask(server, **options)
    assert len(server.asked) == tries


@pytest.mark.slow
def test_a_slow_server_meets_the_deadline():
    start = time.monotonic()
    with pytest.raises(
        RewardError,
        match=r"gave no answer within 0.3 s \(--reward-timeout-s\). Last heard: nothing: prompt 7, sample 2",
    ):
        ask(Server((200, "1"), pause_s=0.9), reward_timeout_s=0.3)
    assert time.monotonic() - start < 5


def test_nobody_there():
    with pytest.raises(RewardError, match="failed 2 times .* Last: ClientConnectorError"):
        ask(Server(), port=9, rm_retries=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs --rm-url"),
        ({"rm_url": "http://a/rm"}, "--rm-url does nothing without --rm-type remote_rm"),
        ({"rm_type": "remote_rm", "rm_url": "a:1/rm"}, "--rm-url a:1/rm: is no http"),
        (
            {"rm_type": "remote_rm", "rm_url": "http://a/rm", "rm_concurrency": 0},
            "--rm-concurrency 0: must be at least 1",
        ),
        ({"rm_type": "remote_rm", "rm_url": "http://a/rm", "rm_retries": 0}, "--rm-retries 0: must be at least 1"),
        ({"rm_type": "exact", "group_rm": True}, "--group-rm does nothing without --custom-rm-path"),
        ({"rm_type": "exact", "eval_reward_key": "a"}, "--eval-reward-key does nothing without"),
        ({"reward_batch_size": 0}, "--reward-batch-size 0: must be at least 1"),
        ({"reward_model_timeout_s": 0.0}, "--reward-model-timeout-s 0.0: must be above 0"),
        ({"reward_model_weight": float("inf")}, "--reward-model-weight inf: must be a finite number"),
    ],
)
def test_impossible_flags_are_refused(options, message):
    (problem,) = RewardConfig(**options).problems()
    assert message in problem
