"""How a forced answer begins; all else of slime_like.rollout.serve.answering is in test_server.py."""

from __future__ import annotations

import pytest

from slime_like.rollout.serve.answering import after_thinking


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n", "<tool_call>"),
        ("<|im_start|>assistant\n<think>\n", "\n</think>\n\n<tool_call>"),  # Qwen3.5, DeepSeek-R1
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<tool_call>"),  # Qwen3 with enable_thinking false
    ],
)
def test_a_forced_call_ends_thinking_that_the_template_has_begun(prompt, opening):
    assert after_thinking(prompt, "<tool_call>") == opening
