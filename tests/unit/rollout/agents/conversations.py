"""Random tokenizers, chat templates of several manners, and conversations that go wrong in every way we know."""

from __future__ import annotations

import dataclasses
import functools
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from slime_like.records import ABORTED, COMPLETED, TRUNCATED
from slime_like.rollout.agents.chat_turns import ChatTurns, TemplateRefusal
from slime_like.rollout.agents.tree import ConversationTree
from slime_like.rollout.generate import Generation

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Manner -> (template, special tokens, what ends an answer). Qwen3 leaves old thinking out and puts an empty one into
#: answers behind the last question; GLM ends an answer with the next message's role.
TEMPLATES: dict[str, tuple[str, list[str], list[str]]] = {
    "chatml": (_CHATML, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
    "default_system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + _CHATML,
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_end|>"],
    ),
    "qwen3": (
        (
            "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
            "{% set text = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
            "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n"
            "{% endif %}"
            "{{ text }}<|im_end|>\n{% elif m.role == 'tool' %}"
            "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
            "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
            "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n"
            "\n</think>\n\n"
            "{% endif %}{% endif %}"
        ),
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_end|>"],
    ),
    "glm": (
        (
            "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
            "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ (m.content or '').strip() }}"
            "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
            "{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        ["<|user|>", "<|observation|>"],
    ),
    "llama": (
        (
            "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
            "{{ (m.content or '') | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        ["<|eot_id|>"],
    ),
    "plain": (
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        ),
        [],
        [],
    ),
    # Those that cannot be gone on from: each turn's text depends on how much history there is.
    "counting": (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content or '' }}<|im_end|>\n"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }}\n{% endif %}"
        ),
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_end|>"],
    ),
    "forgetful": (
        (
            "{% for m in messages[-4:] %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_end|>"],
    ),
    "strict": (
        (
            "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
            "{{ raise_exception('a tool answers nobody') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        ["<|im_start|>", "<|im_end|>"],
        ["<|im_end|>"],
    ),
}
#: The last one cannot render a tool that answers to no call.
REFUSED = ("counting", "forgetful", "strict")
_EOS = "<|endoftext|>"
_LETTERS = "aé漢🙂 \n\t:{}\"'<>|/\\_0اß\u200b\u0301\ue0f5"


@functools.cache
def random_tokenizer(seed: int, manner: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges learned from noise, or characters with a fallback to bytes; another for each seed."""
    rng = random.Random(f"tokenizer {seed}")
    template, special, _ = TEMPLATES[manner]
    words = ["".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 6))) for _ in range(60)]
    corpus = [" ".join(rng.choice(words) for _ in range(20)) for _ in range(40)]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rng.random() < 0.5)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=256 + rng.randint(0, 200), initial_alphabet=alphabet, show_progress=False),
    )
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*special, _EOS]])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_EOS)
    tokenizer.chat_template = template
    return tokenizer


@dataclasses.dataclass
class Played:
    """A conversation that was played: the tree, and all that an engine was sent and answered."""

    manner: str
    tokenizer: PreTrainedTokenizerFast
    turns: ChatTurns
    tree: ConversationTree
    requests: list[tuple[tuple[int, ...], Generation]]
    opened: list[list[dict]]  # conversations that were rendered whole
    num_refused: int = 0


def play(case: int, manner: str) -> Played:
    """One random conversation; the same case is the same conversation."""
    rng = random.Random(f"case {case} {manner}")
    tokenizer = random_tokenizer(case % 25, manner)
    kwargs = {"enable_thinking": False} if rng.random() < 0.3 else {}
    turns = ChatTurns(tokenizer, kwargs)
    played = Played(manner, tokenizer, turns, ConversationTree(turns), [], [])
    messages = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.4 else []
    messages.append({"role": "user", "content": _text(rng)})
    tools = None
    for _ in range(rng.randint(1, 7)):
        if rng.random() < 0.05:
            tools = [{"type": "function", "function": {"name": rng.choice("fgh"), "parameters": {}}}]
        try:
            plan = played.tree.plan(messages, tools)
        except TemplateRefusal:
            played.num_refused += 1
            break
        if plan.parent is None:
            played.opened.append(messages)
        generation = _generation(rng, played)
        played.requests.append((plan.ids, generation))
        node = played.tree.add(plan, generation, _answer(rng, played, generation))
        messages = _next_messages(rng, [*node.messages])
    return played


def _text(rng: random.Random) -> str:
    """Anything that a tool may print, names of special tokens among it."""
    special = [
        "<|im_end|>",
        "<|im_start|>",
        "<|user|>",
        "<|observation|>",
        "<|eot_id|>",
        _EOS,
        "<think>",
        "</think>",
        "\n",
    ]
    parts = [
        rng.choice(special) if rng.random() < 0.2 else "".join(rng.choice(_LETTERS) for _ in range(rng.randint(0, 8)))
        for _ in range(rng.randint(0, 5))
    ]
    return "".join(parts)


def _generation(rng: random.Random, played: Played) -> Generation:
    """Any ids, so nearly never those that encoding their text would give; ended rightly, otherwise, or cut off."""
    size = len(played.tokenizer)
    ids = [rng.randrange(size) for _ in range(rng.randint(0, 9))]
    ends = [played.tokenizer.convert_tokens_to_ids(text) for text in TEMPLATES[played.manner][2]]
    kind = rng.random()
    status = COMPLETED
    if kind < 0.75 and ends:
        ids.append(rng.choice(ends))
    elif kind < 0.85:
        ids.append(played.tokenizer.eos_token_id)
    else:
        ids.append(rng.randrange(size))
        status = rng.choice((COMPLETED, TRUNCATED, ABORTED))
    return Generation(
        tokens=ids,
        logprobs=[-rng.random() for _ in ids],
        text="",
        status=status,
        weight_version=rng.randrange(5),
    )


def _answer(rng: random.Random, played: Played, generation: Generation) -> dict:
    text = played.turns.decode(generation.tokens)
    message: dict = {"role": "assistant", "content": text}
    if rng.random() < 0.3:
        message |= {"content": "", "reasoning_content": text}
    if rng.random() < 0.3:
        arguments = {"x": _text(rng)}
        message["tool_calls"] = [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ]
    return message


def _next_messages(rng: random.Random, messages: list[dict]) -> list[dict]:
    """The conversation goes on: as it stands, spelled otherwise, or with a history that somebody edited."""
    kind, last = rng.random(), messages[-1]
    if kind < 0.15:
        last = {name: value for name, value in last.items() if name != "reasoning_content"}
        messages = [*messages[:-1], last | ({"content": None} if not last["content"] else {})]
    elif kind < 0.25:
        place = rng.randrange(len(messages))
        edited = [*messages]
        edited[place] = {**edited[place], "content": _text(rng) + "edited"}
        messages = edited
    elif kind < 0.32:
        cut = rng.randrange(1, len(messages))
        messages = messages[:cut]
    elif kind < 0.36:
        messages = messages[:1]
    if kind >= 0.36 and rng.random() < 0.03:
        return [{"role": "user", "content": _text(rng)}]
    calls = messages[-1].get("tool_calls") or []
    role = "tool" if rng.random() < (0.8 if calls else 0.2) else "user"
    new = [{"role": role, "content": _text(rng)} for _ in range(rng.choice((1, 1, 1, 2)))]
    return [*messages, *new]
