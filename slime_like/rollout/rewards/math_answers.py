"""Whether a response's final answer equals the label mathematically.

Runs in a worker process: parsing may take for ever.
"""

from __future__ import annotations

import logging
import re

from math_verify import parse

from slime_like.rollout.rewards.boxes import has_box, last_boxed
from slime_like.rollout.rewards.math_equality import same_answer

# It warns on every call that its own time limit is off; ours is the process's alarm.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LAST_WORDS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
#: The line that DAPO's prompt asks for.
_ANSWER_LINE = re.compile(r"(?i:answer)\s*:\s*([^\n]+)")
#: Characters of a response's end in which that line is looked for.
_DAPO_END = 300


def math_score(response: str, label: str) -> float:
    """1 if the last box of the response equals the label; without any box, the last number or formula that it holds.

    Thinking counts too. A last box that was cut off is no answer.
    """
    return _score(last_boxed(response) if has_box(response) else _last_formula(response), label)


def math_strict_score(response: str, label: str) -> float:
    """As math_score, but the answer must be boxed, and as a number be written as the label is (slime's `math`)."""
    return _score(last_boxed(response), label, as_written=True)


def deepscaler_score(response: str, label: str) -> float:
    r"""1 if the marked final answer equals the label; reasoning before the last </think> does not count.

    The answer must be marked: \boxed{…}, <answer>…</answer> or "answer is …". Otherwise 0, whatever numbers the text
    holds.
    """
    return _score(marked_answer(response.rpartition("</think>")[2]), label)


def deepscaler_strict_score(response: str, label: str) -> float:
    """As math_strict_score, of what stands behind the last </think>, or behind the first ###Response.

    0 without either (slime's `deepscaler`).
    """
    if "</think>" in response:
        answer = response.rpartition("</think>")[2]
    elif "###Response" in response:
        answer = response.split("###Response")[1]
    else:
        return 0.0
    return math_strict_score(answer, label)


def dapo_score(response: str, label: str) -> float:
    """1 if the last line "Answer: …" within the response's last 300 characters equals the label, else -1.

    The rule of DAPO (arXiv:2503.14476, sec. 2.4, eq. 7, and its public recipe).
    """
    lines = _ANSWER_LINE.findall(response[-_DAPO_END:])
    answer = lines[-1].strip() if lines else None
    if answer is not None and has_box(answer):
        answer = last_boxed(answer)
    return 2 * _score(answer and answer.strip("* ").rstrip(".").strip("* "), label, as_written=True) - 1


def marked_answer(text: str) -> str | None:
    r"""The content of the last \boxed{…}, else of the last <answer> tag, else what follows the last "answer is".

    None if unmarked.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = _ANSWER_TAG.findall(text)
    if tagged:
        return last_boxed(tagged[-1]) or tagged[-1].strip()
    said = _LAST_WORDS.findall(text)
    return said[-1].strip().rstrip(".") if said else None


def _last_formula(text: str) -> str | None:
    """What math_verify takes for the answer of an unboxed text, as it is written there: the last formula or number."""
    read = parse(text.replace("\\$", ""), parsing_timeout=None)
    return read[-1] if read and isinstance(read[-1], str) else None


def _score(answer: str | None, label: str, *, as_written: bool = False) -> float:
    gold = last_boxed(label) if has_box(label) else label
    return float(bool(answer) and bool(gold) and same_answer(str(answer), str(gold), as_written=as_written))


SCORERS = {
    "dapo": dapo_score,
    "math": math_score,
    "math_strict": math_strict_score,
    "deepscaler": deepscaler_score,
    "deepscaler_strict": deepscaler_strict_score,
}
