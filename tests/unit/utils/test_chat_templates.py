"""A chat template that does not end, or fills memory, costs seconds and one clear message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slime_like.errors import DataError
from slime_like.rollout.chat_messages import render
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.utils import chat_templates
from slime_like.utils.chat_templates import TemplateLimit, apply_template, try_template

TINY = Path(__file__).parents[3] / "models" / "tiny-qwen3"
ASK = [{"role": "user", "content": "a"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(TINY))


def test_a_plain_template_renders_as_transformers_does(tokenizer):
    text = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert apply_template(tokenizer, ASK, add_generation_prompt=True) == text
    try_template(tokenizer, {})


def test_a_loop_without_end_is_ended(tokenizer):
    tokenizer.chat_template = ENDLESS
    start = time.monotonic()
    with pytest.raises(TemplateLimit, match="not done with 1 messages after 0.3 s"):
        apply_template(tokenizer, ASK, seconds=0.3)
    assert time.monotonic() - start < 10


def test_a_text_too_long_is_refused(tokenizer):
    tokenizer.chat_template = f"{{{{ messages[0].content * {chat_templates.LONGEST_TEXT + 1} }}}}"
    with pytest.raises(TemplateLimit, match="at most"):
        apply_template(tokenizer, ASK)
    with pytest.raises(DataError, match="x line 1: the chat template of --hf-checkpoint is given up: it made"):
        render(tokenizer, ASK, None, "x line 1")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "did not end within 1 s"),
        ("{{ (7 ** (9 ** 9))|string }}", "did not end within 1 s"),  # one call into C, which no exception reaches
        ("{{ 'a' * 10**11 }}", "took more than 2 GiB"),
    ],
)
def test_the_trial_can_be_killed(tokenizer, template, message):
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(DataError, match=f"the chat template of --hf-checkpoint {message}"):
        try_template(tokenizer, {}, seconds=1.0)
    assert time.monotonic() - start < 10


def test_a_template_that_refuses_a_probe_is_not_refused(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('only tools') }}"
    try_template(tokenizer, {})
    tokenizer.chat_template = None
    try_template(tokenizer, {})
