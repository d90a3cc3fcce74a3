"""What was answered for a group in the making is given back once, to the same request, and to nobody else."""

from __future__ import annotations

import asyncio

from slime_like.rollout.kept_answers import AnswerSlot, KeptAnswers, slot_of

SEED = {"sampling_seed": 7}


def answer(kept: KeptAnswers, prompt: int, *answers: tuple[dict, list[int], str]) -> None:
    """As a client would, inside the group of a prompt."""
    for sampling, tokens, text in answers:
        slot_of(sampling, tokens).answer = text


def test_a_group_that_is_over_keeps_nothing():
    kept = KeptAnswers()
    with kept.group(3):
        answer(kept, 3, (SEED, [1, 2], "a"), (SEED, [1, 2], "b"), ({}, [1, 2], "of nobody"))
        slot_of(SEED, [9])  # not answered yet
        assert [(slot.prompt, slot.sent, slot.answer) for slot in kept.slots()] == [
            (3, (1, 2), "a"),
            (3, (1, 2), "b"),
        ]
    assert kept.slots() == ()
    answer(kept, 3, (SEED, [1, 2], "an evaluation's"))
    assert kept.slots() == ()


def test_an_earlier_process_s_answer_is_given_once_and_is_kept_on():
    kept = KeptAnswers()
    kept.put([AnswerSlot(3, 7, (1, 2), "a"), AnswerSlot(3, 7, (1, 2), "b"), AnswerSlot(4, 7, (1, 2), "of another")])
    with kept.group(3):
        assert [slot_of(SEED, [1, 2]).answer for _ in range(3)] == ["a", "b", None]
        assert slot_of({"sampling_seed": 8}, [1, 2]).answer is None and slot_of(SEED, [1]).answer is None
        assert sorted(slot.answer for slot in kept.slots()) == ["a", "b", "of another"]
    assert [slot.answer for slot in kept.slots()] == ["of another"]


def test_tasks_of_a_group_share_it_and_a_group_that_is_made_again_begins_anew():
    async def test():
        kept, may_end = KeptAnswers(), asyncio.Event()

        async def make(text: str) -> None:
            with kept.group(5):
                await asyncio.gather(*(asyncio.to_thread(answer, kept, 5, (SEED, [part], text)) for part in (1, 2)))
                await may_end.wait()

        first = asyncio.create_task(make("thrown away"))
        await asyncio.sleep(0.05)
        assert len(kept.slots()) == 2
        second = asyncio.create_task(make("again"))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert {slot.answer for slot in kept.slots()} == {"again"}
        may_end.set()
        await second

    asyncio.run(asyncio.wait_for(test(), 10))
