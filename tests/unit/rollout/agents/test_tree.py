"""Every row of a conversation tree, against a plain record of what an engine was sent and what it answered."""

# Covers slime_like.rollout.agents.invariants and slime_like.rollout.agents.turn_nodes too.

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from slime_like.records import ABORTED, COMPLETED, TRUNCATED, Prompt
from slime_like.rollout.agents.chat_turns import ChatTurns
from slime_like.rollout.agents.tree import ConversationTree
from slime_like.rollout.generate import Generation
from tests.unit.rollout.agents.conversations import REFUSED, TEMPLATES, Played, play

PROMPT = Prompt(index=3, text="", tokens=np.array([1, 2], dtype=np.int32))
QUICK_CASES, ALL_CASES = 40, 1_200  # of each of nine templates


def check(played: Played) -> collections.Counter[str]:
    """Every trained token was sampled in exactly its row's context, with its log-prob and version, and is trained once;
    what is missing is trimmed, or belongs to a row that was refused by name. Counts what came of the conversation.
    """
    rows = played.tree.samples(PROMPT, 7)
    sampled = collections.Counter()
    for sent, generation in played.requests:
        for place, (token, logprob) in enumerate(zip(generation.tokens, generation.logprobs, strict=True)):
            sampled[(*sent, *generation.tokens[:place]), token, np.float32(logprob), generation.weight_version] += 1
    trained = collections.Counter()
    for number, row in enumerate(rows.samples):
        assert (row.prompt_index, row.sample_index, row.segment_index) == (3, 7, number)
        ids = row.tokens.tolist()
        for place in range(len(ids)):
            if row.loss_mask[place]:
                trained[
                    tuple(ids[:place]), ids[place], row.engine_logprobs[place], int(row.weight_versions[place])
                ] += 1
            else:
                assert row.engine_logprobs[place] == 0 and row.weight_versions[place] == -1
        assert any(tuple(ids) == (*sent, *generation.tokens) for sent, generation in played.requests)
    assert trained <= sampled, "a token is trained that was not sampled there, or twice"
    if not rows.violations:
        assert (sampled - trained).total() == rows.num_trimmed
    assert all(violation.name == "canonical" for violation in rows.violations), rows.violations
    assert rows.violations == () or played.manner in REFUSED, rows.violations
    for messages in played.opened:
        assert_no_special_token_from_text(played, messages)
    return collections.Counter(
        rows=len(rows.samples),
        violations=len(rows.violations),
        trimmed=rows.num_trimmed,
        forks=max(0, rows.num_roots - 1),
        refused=played.num_refused,
        deep=sum(len(leaf.path) > 1 for leaf in played.tree.leaves()),
    )


def assert_no_special_token_from_text(played: Played, messages: list[dict]) -> None:
    """As many special tokens as in the same conversation about harmless things."""
    harmless = [{**message, "content": "z"} for message in messages]
    special = played.turns.special_ids
    counts = [sum(token in special for token in played.turns.whole(texts)[1]) for texts in (messages, harmless)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("manner", TEMPLATES)
def test_rows_hold_what_was_sampled_and_nothing_else(manner):
    seen = sum((check(play(case, manner)) for case in range(QUICK_CASES)), collections.Counter())
    assert seen["rows"] > QUICK_CASES and seen["deep"] > QUICK_CASES // 3 and seen["forks"] > 0
    assert (seen["violations"] > 0) == (manner in REFUSED)
    assert seen["trimmed"] > 0 or manner in REFUSED


@pytest.mark.long_run
@pytest.mark.timeout(900)
@pytest.mark.parametrize("manner", TEMPLATES)
def test_ten_thousand_conversations(manner):
    seen = sum((check(play(case, manner)) for case in range(QUICK_CASES, ALL_CASES)), collections.Counter())
    assert seen["deep"] > 300 and (seen["violations"] > 0) == (manner in REFUSED)


def generation(ids: list[int], status: str = COMPLETED) -> Generation:
    return Generation(tokens=ids, logprobs=[-0.5] * len(ids), text="", status=status, weight_version=1)


@pytest.fixture
def talk(tokenizer):
    """A tree on the tiny ChatML tokenizer, and what `text` is in ids with the end of turn."""
    tree = ConversationTree(ChatTurns(tokenizer))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def say(plan, text, status=COMPLETED):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [end] * (status == COMPLETED)
        return tree.add(plan, generation(ids, status), {"role": "assistant", "content": text})

    return tree, say


USER = {"role": "user", "content": "sort 21"}


def test_the_next_prompt_is_the_last_one_with_what_was_sampled_and_the_templates_own_words(talk, tokenizer):
    tree, say = talk
    first = say(tree.plan([USER]), "12")
    plan = tree.plan([USER, first.message, {"role": "user", "content": "lower"}])
    assert plan.ids[: len(first.ids)] == first.ids
    assert (
        tokenizer.decode(plan.ids[len(first.ids) :]) == "\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_was_sampled_is_kept_where_its_text_would_be_tokenized_otherwise(talk, tokenizer):
    tree, _ = talk
    spelled = [*(tokenizer.convert_tokens_to_ids(letter) for letter in "sort"), tokenizer.eos_token_id]
    assert tokenizer("sort", add_special_tokens=False)["input_ids"] != spelled[:-1]
    node = tree.add(tree.plan([USER]), generation(spelled), {"role": "assistant", "content": "sort"})
    plan = tree.plan([USER, node.message, USER])
    assert plan.ids[len(node.plan.ids) : len(node.ids)] == tuple(spelled)
    (row,) = tree.samples(PROMPT, 0).samples
    assert row.tokens[row.loss_mask == 1].tolist() == spelled


@pytest.mark.parametrize("status", [TRUNCATED, ABORTED])
def test_an_answer_that_did_not_end_is_not_gone_on_from(talk, status):
    tree, say = talk
    cut = say(tree.plan([USER]), "1", status)
    assert tree.plan([USER, cut.message, USER]).parent is None


def test_an_edited_history_begins_another_row_and_nothing_is_trained_twice(talk):
    tree, say = talk
    first = say(tree.plan([USER]), "12")
    talked = [USER, first.message, {"role": "user", "content": "higher"}]
    say(tree.plan(talked), "13")
    say(tree.plan([*talked[:2], {"role": "user", "content": "lower"}]), "11")  # shares the first answer
    say(tree.plan([{"role": "user", "content": "other"}, *talked[1:]]), "15")  # shares nothing
    rows = tree.samples(PROMPT, 0)
    assert len(rows.samples) == 3 and rows.num_roots == 2 and rows.violations == ()
    assert [int(row.loss_mask.sum()) for row in rows.samples] == [6, 3, 3], "the shared answer is trained in one row"


def test_another_tool_begins_another_row(talk):
    tree, say = talk
    first = say(tree.plan([USER]), "12")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tree.plan([USER, first.message, USER], tools).parent is None
    assert tree.plan([USER, first.message, USER]).parent is first


def test_arguments_are_the_same_as_json_and_as_an_object(talk):
    tree, _ = talk
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    text = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    node = tree.add(tree.plan([USER]), generation([5, 299]), message)
    replayed = {"role": "assistant", "content": None, "tool_calls": [text]}
    plan = tree.plan([USER, replayed, USER])
    assert plan.parent is node and plan.messages[1] == message, "the stored message stands"


@pytest.mark.parametrize(
    "broken, name",
    [
        ({"logprobs": [-0.5]}, "lengths"),
        ({"logprobs": [-0.5, float("nan"), -0.5]}, "lengths"),
        ({"weight_version": -1}, "lengths"),
        ({"status": TRUNCATED}, "ended"),
    ],
)
def test_a_row_with_a_broken_answer_is_left_out_by_name(talk, broken, name):
    tree, say = talk
    first = say(tree.plan([USER]), "12")
    say(tree.plan([USER, first.message, USER]), "12")
    tree.nodes[0].generation.__dict__.update(dataclasses.replace(first.generation, **broken).__dict__)
    rows = tree.samples(PROMPT, 0)
    assert rows.samples == () and [violation.name for violation in rows.violations] == [name]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"ids": (1, 2, 3, 4, 5, 6)}, "prefix"),
        ({"key": "other"}, "root_key"),
        ({"messages": (USER, USER, USER)}, "stored"),
        ({"num_trimmed": 2}, "prefix"),
        ({"opening_text": "<|im_end|>\n<|im_start|>user\nsomething else<|im_end|>"}, "canonical"),
    ],
)
def test_a_plan_that_was_tampered_with_is_left_out_by_name(talk, changes, name):
    tree, say = talk
    first = say(tree.plan([USER]), "12")
    say(dataclasses.replace(tree.plan([USER, first.message, USER]), **changes), "12")
    rows = tree.samples(PROMPT, 0)
    assert rows.samples == () and [violation.name for violation in rows.violations] == [name]
