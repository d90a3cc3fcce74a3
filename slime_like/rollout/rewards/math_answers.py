"""Whether a response's final answer equals the label mathematically. Runs in a worker process: parsing may take for ever."""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

# It warns on every call that its own time limit is off; ours is the process's alarm.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LAST_WORDS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[")


def math_score(response: str, label: str) -> float:
    """1 if the answer found anywhere in the response (the last one, boxed ones first) equals the label."""
    return _equal(_parse(response), label)


def deepscaler_score(response: str, label: str) -> float:
    r"""1 if the marked final answer equals the label; reasoning before the last </think> does not count.

    The answer must be marked: \boxed{…}, <answer>…</answer> or "answer is …". Otherwise 0, whatever numbers the text holds.
    """
    answer = marked_answer(response.rpartition("</think>")[2])
    return 0.0 if answer is None else _equal(_parse(_as_math(answer)), label)


def marked_answer(text: str) -> str | None:
    r"""The content of the last \boxed{…}, else of the last <answer> tag, else what follows the last "answer is"; None if unmarked."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    tagged = _ANSWER_TAG.findall(text)
    if tagged:
        return _last_boxed(tagged[-1]) or tagged[-1].strip()
    said = _LAST_WORDS.findall(text)
    return said[-1].strip().rstrip(".") if said else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None  # cut off inside the braces


def _equal(found: list, label: str) -> float:
    gold = _parse(_as_math(label))
    if not found or not gold:
        return 0.0
    return float(verify(gold, found, timeout_seconds=None))


def _as_math(text: str) -> str:
    """Math mode for bare text: `\\frac{1}{2}` is only read as a formula between its marks."""
    return text if _MARKED.search(text) else f"\\boxed{{{text}}}"


def _parse(text: str) -> list:
    return parse(text, parsing_timeout=None)


SCORERS = {"math": math_score, "deepscaler": deepscaler_score}
