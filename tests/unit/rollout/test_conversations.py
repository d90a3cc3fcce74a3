"""Which tokens of conversations are trained, against three oracles: HF's generation tags, templates written out as
plain Python, and what is expected of a conversation that can be read here.
"""

from __future__ import annotations

import copy
import random

import pytest

from slime_like.errors import DataError
from slime_like.records import SupervisedTokens
from slime_like.rollout.conversations import Conversations
from tests.unit.rollout.agents.conversations import TEMPLATES, random_tokenizer

ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
#: ChatML with tools, calls, and Hugging Face's marks around what the assistant writes.
TAGGED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = "aé漢🙂ab c\"'<>|/{}0ß"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def samples_of(tokenizer, messages, tools=None, kind="all", **kwargs) -> list[SupervisedTokens]:
    return Conversations(tokenizer, kind, kwargs).samples(messages, tools, "x.jsonl line 3")


def spans(tokenizer, sample: SupervisedTokens) -> list[tuple[str, str]]:
    """(all text before, text) of each run of trained tokens."""
    ids, mask = sample.tokens.tolist(), sample.loss_mask.tolist()
    begins = [i for i in range(len(ids)) if mask[i] and not (i and mask[i - 1])]
    ends = [i + 1 for i in range(len(ids)) if mask[i] and not (i + 1 < len(ids) and mask[i + 1])]
    return [(tokenizer.decode(ids[:a]), tokenizer.decode(ids[a:b])) for a, b in zip(begins, ends, strict=True)]


def words(rng: random.Random) -> str:
    return "x" + "".join(rng.choice(_LETTERS) for _ in range(rng.randint(0, 9))).strip() + "x"


def conversation(rng: random.Random, *, reasons: bool = False, calls: bool = False) -> list[dict]:
    """Questions, each with up to two uses of a tool before its answer."""
    messages = [{"role": "system", "content": words(rng)}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 4)):
        messages.append(user(words(rng)))
        for _ in range(rng.randint(0, 2)):
            more = {"reasoning_content": words(rng)} if reasons and rng.random() < 0.6 else {}
            more |= {"tool_calls": [CALL]} if calls else {}
            messages += [assistant(words(rng), **more), tool(words(rng))]
        more = {"reasoning_content": words(rng)} if reasons and rng.random() < 0.6 else {}
        messages.append(assistant(words(rng), **more))
    return messages


@pytest.mark.parametrize("kind", ["all", "last"])
def test_the_mask_is_hugging_faces_where_the_template_has_generation_tags(tokenizer, kind):
    tagged = copy.deepcopy(tokenizer)
    tagged.chat_template = TAGGED
    for case in range(60):
        rng = random.Random(case)
        messages, tools = conversation(rng, calls=True), [ADD] if rng.random() < 0.5 else None
        oracle = tagged.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = oracle["input_ids"], oracle["assistant_masks"]
        assert sum(mask), "the oracle trains something"
        end = max(i for i in range(len(mask)) if mask[i]) + 1
        if kind == "last":
            begin = max((i for i in range(end) if not mask[i]), default=-1) + 1
            mask = [int(begin <= i) for i in range(end)]
        (sample,) = samples_of(tagged, messages, tools, kind)
        assert sample.tokens.tolist() == ids[:end] and sample.loss_mask.tolist() == mask[:end]


# What the templates of tests/unit/rollout/agents/conversations.py say, in Python: (the text that an engine is sent for
# the answer messages[place], what the assistant then writes).


def chatml(messages: list[dict], place: int) -> tuple[str, str]:
    context = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:place])
    return context + "<|im_start|>assistant\n", messages[place]["content"] + "<|im_end|>"


def llama(messages: list[dict], place: int) -> tuple[str, str]:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    context = "".join(head.format(m["role"]) + m["content"] + "<|eot_id|>" for m in messages[:place])
    return "<|begin_of_text|>" + context + head.format("assistant"), messages[place]["content"] + "<|eot_id|>"


def glm(messages: list[dict], place: int) -> tuple[str, str]:
    text = "[gMASK]<sop>"
    for m in messages[:place]:
        if m["role"] == "assistant":
            text += "<|assistant|>\n<think></think>\n" + m["content"]
        elif m["role"] == "tool":
            text += "<|observation|>\n<tool_response>\n" + m["content"] + "\n</tool_response>"
        else:
            text += f"<|{m['role']}|>\n" + m["content"]
    end = "<|observation|>" if place + 1 < len(messages) and messages[place + 1]["role"] == "tool" else "<|user|>"
    return text + "<|assistant|>\n", "<think></think>\n" + messages[place]["content"] + end


def qwen3(messages: list[dict], place: int) -> tuple[str, str]:
    last = max((i for i in range(place) if messages[i]["role"] == "user"), default=0)
    text = ""
    for i, m in enumerate(messages[:place]):
        if m["role"] == "assistant":
            thinking = f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n" if i > last else ""
            text += "<|im_start|>assistant\n" + thinking + m["content"] + "<|im_end|>\n"
        elif m["role"] == "tool":
            text += f"<|im_start|>user\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n"
        else:
            text += f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"
    wrote = f"<think>\n{messages[place].get('reasoning_content', '')}\n</think>\n\n{messages[place]['content']}"
    return text + "<|im_start|>assistant\n", wrote + "<|im_end|>"


@pytest.mark.parametrize("manner", ["chatml", "llama", "glm", "qwen3"])
def test_each_turn_is_trained_once_in_the_context_that_it_was_said_in(manner):
    """Against plain Python loops, over 300 random tokenizers and conversations a template."""
    oracle = {"chatml": chatml, "llama": llama, "glm": glm, "qwen3": qwen3}[manner]
    numbers = set()
    for case in range(300):
        rng = random.Random(f"{case} {manner}")
        tokenizer = random_tokenizer(case % 10, manner)
        messages = conversation(rng, reasons=manner == "qwen3")
        samples = samples_of(tokenizer, messages)
        expected = [oracle(messages, place) for place, m in enumerate(messages) if m["role"] == "assistant"]
        assert [span for sample in samples for span in spans(tokenizer, sample)] == expected
        numbers.add(len(samples))
        assert all(sample.loss_mask[-1] == 1 for sample in samples)
    assert numbers == {1} if manner != "qwen3" else len(numbers) > 2


def test_a_template_that_leaves_out_old_thinking_gives_a_sample_a_question():
    tokenizer = random_tokenizer(0, "qwen3")
    messages = [
        user("one"),
        assistant("", reasoning_content="call", tool_calls=[]),
        tool("1"),
        assistant("A", reasoning_content="read"),
        user("two"),
        assistant("B"),
    ]
    first, second = samples_of(tokenizer, messages)
    assert [wrote for _, wrote in spans(tokenizer, first)] == [
        "<think>\ncall\n</think>\n\n<|im_end|>",
        "<think>\nread\n</think>\n\nA<|im_end|>",
    ]
    ((context, wrote),) = spans(tokenizer, second)
    assert wrote == "<think>\n\n</think>\n\nB<|im_end|>" and "read" not in context and "A<|im_end|>" in context
    (last,) = samples_of(tokenizer, messages, kind="last")
    assert spans(tokenizer, last) == [(context, wrote)]
    ((context, wrote),) = spans(tokenizer, samples_of(tokenizer, messages[-2:], enable_thinking=False)[0])
    assert context.endswith("<think>\n\n</think>\n\n") and wrote == "B<|im_end|>"


def test_a_call_ends_with_the_token_of_the_tools_answer_where_turns_end_so():
    tokenizer = random_tokenizer(0, "glm")
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    shows_calls = (
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}{% elif m.role == 'tool'"
    )
    tokenizer.chat_template = TEMPLATES["glm"][0].replace("{% elif m.role == 'tool'", shows_calls)
    (sample,) = samples_of(tokenizer, [user("1+0"), assistant("", tool_calls=[CALL])])
    assert spans(tokenizer, sample)[0][1] == "<think></think>\n<tool_call>add<|observation|>"
    (sample,) = samples_of(tokenizer, [user("1+0"), assistant("1")])
    assert spans(tokenizer, sample)[0][1] == "<think></think>\n1<|user|>"


def test_step_loss_mask_leaves_turns_out_and_the_template_never_sees_it(tokenizer):
    messages = [user("a"), assistant("b", step_loss_mask=0), user("c"), assistant("d", step_loss_mask=1), user("e")]
    (sample,) = samples_of(tokenizer, messages)
    ((context, wrote),) = spans(tokenizer, sample)
    assert wrote == "d<|im_end|>" and "assistant\nb<|im_end|>" in context
    assert samples_of(tokenizer, messages[:2]) == []
    assert samples_of(tokenizer, [*messages[:3], assistant("d", step_loss_mask=0)], kind="last") == []
    with pytest.raises(DataError, match="line 3: 'step_loss_mask' is 0.5"):
        samples_of(tokenizer, [user("a"), assistant("b", step_loss_mask=0.5)])


def test_what_was_trained_may_go_on_in_text_that_the_template_itself_writes(tokenizer):
    """An answer's own white space is a token of the answer, never half of one with the template's."""
    (sample,) = samples_of(tokenizer, [user("a"), assistant("\n\n b \n")])
    assert spans(tokenizer, sample)[0][1] == "\n\n b \n<|im_end|>"


DISTILLED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ (m.content or '').split('</think>')[-1] }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("thinking", ["<think>\nwhy\n</think>\n\n", "why\n</think>\n\n"])
def test_thinking_that_a_template_leaves_out_of_every_message_is_trained_as_it_is_written(tokenizer, thinking):
    """As DeepSeek-R1's distilled models have it: the template begins the thinking, and shows no message's."""
    distilled = copy.deepcopy(tokenizer)
    distilled.chat_template = DISTILLED
    message = assistant(thinking + "A")
    samples = samples_of(distilled, [user("q"), message, user("r"), message])
    assert [span[1] for sample in samples for span in spans(distilled, sample)] == ["why\n</think>\n\nA<|im_end|>"] * 2
    assert all(spans(distilled, sample)[0][0].endswith("assistant\n<think>\n") for sample in samples)
    assert "why" not in spans(distilled, samples[1])[0][0]
    for unknown in (assistant("A", reasoning_content="why"), assistant("A")):
        with pytest.raises(DataError, match="message 2: .* begins an answer with .*<think>', which is not how"):
            samples_of(distilled, [user("q"), unknown])


def test_calls_may_be_shown_by_their_ids(tokenizer):
    shows_ids = copy.deepcopy(tokenizer)
    shows_ids.chat_template = TAGGED.replace("call.function | tojson", "call.id")
    (sample,) = samples_of(shows_ids, [user("1+0"), assistant("", tool_calls=[CALL | {"id": "functions.a:0"}])])
    assert spans(shows_ids, sample)[0][1] == "<call>functions.a:0</call><|im_end|>"


@pytest.mark.parametrize(
    ("manner", "messages", "message"),
    [
        ("chatml", [user("a")], "line 3: none of its 1 messages is the assistant's"),
        ("chatml", [assistant("a")], "line 3, message 1: .* there is nothing that it answers"),
        (
            "chatml",
            [user("a"), assistant("b", reasoning_content="why")],
            "message 2: .* leaves out its 'reasoning_content'",
        ),
        ("chatml", [user("a"), assistant("b", tool_calls=[CALL])], "message 2: .* leaves out its 'tool_calls'"),
        ("strict", [user("a"), tool("b"), assistant("c")], "line 3, message 3: the chat template refuses the messages"),
    ],
)
def test_rows_that_cannot_be_trained_as_they_stand_are_named(manner, messages, message):
    with pytest.raises(DataError, match=message):
        samples_of(random_tokenizer(0, manner), messages)


def test_an_answer_behind_thinking_that_is_switched_off_is_refused():
    messages = [user("a"), assistant("b", reasoning_content="why")]
    with pytest.raises(DataError, match="message 2: .* begins an answer with .*</think>.*enable_thinking"):
        samples_of(random_tokenizer(0, "qwen3"), messages, enable_thinking=False)


def test_a_template_without_an_end_of_turn_ends_with_the_tokenizers(tokenizer):
    plain = random_tokenizer(0, "plain")
    samples = samples_of(plain, [user("a"), assistant("b"), user("c"), assistant("d")])
    assert [spans(plain, sample) for sample in samples] == [
        [("user: a\nassistant:", " b<|endoftext|>")],
        [("user: a\nassistant: b\nuser: c\nassistant:", " d<|endoftext|>")],
    ]
