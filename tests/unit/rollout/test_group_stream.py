"""Order, bounds and accounting of the stream of groups, over a maker that a test holds in its hand."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from slime_like.errors import RunError
from slime_like.records import FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.group_stream import GroupStream, StreamLimits
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.prompt_feed import PromptFeed


class Source:
    """Endless prompts."""

    rows = [None]

    def prompt_at(self, position: int) -> Prompt:
        return Prompt(index=position, text="", tokens=np.array([1], dtype=np.int32))


class Maker:
    """Makes a group when the test lets it: `finish(3)`. fails: prompts whose only sample fails."""

    def __init__(self, fails=()):
        self.begun: list[int] = []
        self.fails = fails
        self._waiting: dict[int, asyncio.Event] = {}

    async def __call__(self, prompt: Prompt) -> GroupOutcome:
        self.begun.append(prompt.index)
        await self._waiting.setdefault(prompt.index, asyncio.Event()).wait()
        fields = {"tokens": prompt.tokens, "loss_mask": np.ones(1, np.int8), "engine_logprobs": np.zeros(1, np.float32)}
        status = {"status": FAILED, "error": "gone"} if prompt.index in self.fails else {}
        sample = Sample(
            prompt_index=prompt.index,
            sample_index=0,
            weight_versions=np.zeros(1, np.int32),
            response="",
            reward=0.0,
            **fields,
            **status,
        )
        return GroupOutcome(group=SampleGroup(prompt=prompt, samples=(sample,)), num_failures=0)

    async def finish(self, *prompts: int) -> None:
        for prompt in prompts:
            self._waiting.setdefault(prompt, asyncio.Event()).set()
            for _ in range(5):
                await asyncio.sleep(0)


def stream_of(maker, *, judge=lambda outcome: None, **limits) -> GroupStream:
    return GroupStream(PromptFeed(Source()), maker, judge, StreamLimits(**limits))


def prompts_of(taken) -> list[int]:
    return [group.prompt.index for group in taken.groups]


def run(test):
    return asyncio.run(asyncio.wait_for(test, 5))


def test_groups_come_in_the_prompts_order_and_nothing_is_left_in_flight():
    async def test():
        maker = Maker()
        stream = stream_of(maker)
        taking = asyncio.ensure_future(stream.take(3))
        await maker.finish(2, 0, 1)
        taken = await taking
        assert prompts_of(taken) == [0, 1, 2] and stream.num_in_flight == stream.num_ready == 0
        assert stream._pool._feed.ledger.counts()["taken"] == 3

    run(test())


def test_a_gap_is_filled_at_once_without_waiting_for_the_others():
    async def test():
        maker = Maker(fails={1})
        stream = stream_of(maker)
        taking = asyncio.ensure_future(stream.take(3))
        await maker.finish(0, 1)
        assert maker.begun == [0, 1, 2, 3]  # 2 still runs
        await maker.finish(3, 2)
        taken = await taking
        assert prompts_of(taken) == [0, 2, 3] and taken.dropped == {"failed": 1} and len(taken.outcomes) == 4

    run(test())


def test_engines_that_answer_nothing_get_no_more_requests():
    async def test():
        maker = Maker(fails=range(99))
        stream = stream_of(maker)
        taking = asyncio.ensure_future(stream.take(2))
        await maker.finish(0)
        assert maker.begun == [0, 1]
        await maker.finish(1)
        with pytest.raises(RunError, match="all 2 samples failed. Last error: gone"):
            await taking

    run(test())


def test_what_a_filter_keeps_beyond_the_count_is_surplus():
    async def test():
        maker = Maker()
        stream = stream_of(
            maker, judge=lambda outcome: None if outcome.group.prompt.index % 2 == 0 else "filter/odd", draw_batch=5
        )
        taking = asyncio.ensure_future(stream.take(2))
        await maker.finish(4, 3, 2, 1, 0)
        taken = await taking
        assert prompts_of(taken) == [0, 2] and taken.dropped == {"filter/odd": 2, "surplus": 1}

    run(test())


def test_the_bound_on_draws():
    async def test():
        maker = Maker()
        stream = stream_of(maker, judge=lambda outcome: "filter/all", max_draws=2)
        taking = asyncio.ensure_future(stream.take(2))
        await maker.finish(*range(6))
        with pytest.raises(RunError, match=r"of 4 prompts only 0 of 2 groups could be kept .*Dropped: filter/all 4"):
            await taking
        assert maker.begun == [0, 1, 2, 3]

    run(test())


def test_after_a_failure_of_a_users_function_the_prompts_are_put_back():
    async def test():
        async def make(prompt):
            if prompt.index == 1:
                raise RunError("the filter's own fault")
            await asyncio.sleep(60)

        stream = stream_of(make)
        with pytest.raises(RunError, match="the filter's own fault"):
            await stream.take(3)
        assert stream.num_in_flight == 0 and stream._pool._feed.ledger.counts()["waiting"] == 3
        assert stream._pool._feed.ledger.draw(4) == [0, 1, 2, 3]

    run(test())


def test_two_takes_at_a_time_are_refused():
    async def test():
        maker = Maker()
        stream = stream_of(maker)
        first = asyncio.ensure_future(stream.take(1))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="2 groups were asked for while others are still being taken"):
            await stream.take(2)
        await maker.finish(0)
        assert prompts_of(await first) == [0]

    run(test())


def test_a_long_queue_is_not_drawn_before_there_is_room():
    async def test():
        maker = Maker()
        stream = stream_of(maker, max_running=3)
        taking = asyncio.ensure_future(stream.take(100_000))
        await maker.finish(1)
        assert maker.begun == [0, 1, 2, 3] and stream.num_in_flight == 3 and stream.num_ready == 1
        assert len(asyncio.all_tasks()) == 6  # the three, the take, this one and who waits for it
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

    run(test())


def test_a_bound_on_what_runs_changes_nothing_of_what_comes():
    async def test():
        maker = Maker()
        stream = stream_of(
            maker, max_running=2, draw_batch=4, judge=lambda outcome: "even" if is_even(outcome) else None
        )
        taking = asyncio.ensure_future(stream.take(3))
        for prompt in range(8):
            await maker.finish(prompt)
        taken = await asyncio.wait_for(taking, 5)
        assert prompts_of(taken) == [1, 3, 5] and stream.num_in_flight == 0

    run(test())


def is_even(outcome: GroupOutcome) -> bool:
    return outcome.group.prompt.index % 2 == 0


def test_engines_that_are_gone_meet_no_more_prompts_than_run_at_a_time():
    async def test():
        maker = Maker(fails=range(1000))
        stream = stream_of(maker, max_running=4)
        taking = asyncio.ensure_future(stream.take(1000))
        await maker.finish(0, 1, 2, 3)
        with pytest.raises(RunError, match="all 4 samples failed"):
            await asyncio.wait_for(taking, 5)
        assert maker.begun == [0, 1, 2, 3]

    run(test())
