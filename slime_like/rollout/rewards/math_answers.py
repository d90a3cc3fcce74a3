"""Whether a response's final answer equals the label mathematically.

Runs in a worker process: parsing may take for ever.
"""

from __future__ import annotations

import logging
import re

from math_verify import parse

from slime_like.rollout.rewards.math_equality import same_answer

# It warns on every call that its own time limit is off; ours is the process's alarm.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LAST_WORDS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
#: A brace, or what a backslash escapes: \{ and \} are printed, and need not come in pairs.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def math_score(response: str, label: str) -> float:
    """1 if the last box of the response equals the label; without any box, the last number or formula that it holds.

    Thinking counts too. A last box that was cut off is no answer.
    """
    return _score(last_boxed(response) if _BOX.search(response) else _last_formula(response), label)


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


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}; None without one, or where it was cut off inside the braces."""
    begins = [match.end() for match in _BOX.finditer(text)]
    depth = 1
    for mark in _BRACE.finditer(text, begins[-1]) if begins else ():
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[begins[-1] : mark.start()].strip()
    return None


def _last_formula(text: str) -> str | None:
    """What math_verify takes for the answer of an unboxed text, as it is written there: the last formula or number."""
    read = parse(text.replace("\\$", ""), parsing_timeout=None)
    return read[-1] if read and isinstance(read[-1], str) else None


def _score(answer: str | None, label: str, *, as_written: bool = False) -> float:
    gold = last_boxed(label) if _BOX.search(label) else label
    return float(bool(answer) and bool(gold) and same_answer(str(answer), str(gold), as_written=as_written))


SCORERS = {
    "math": math_score,
    "math_strict": math_strict_score,
    "deepscaler": deepscaler_score,
    "deepscaler_strict": deepscaler_strict_score,
}
