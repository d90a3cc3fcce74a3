"""Rewards that compare words: the F1 of answers in plain text, and the letter of a multiple choice."""

from __future__ import annotations

import collections
import re
import string
from typing import Any

from slime_like.records import Sample
from slime_like.rollout.rewards.boxes import last_boxed

_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: Answers that have no words to share: half of "yes" is no.
_WHOLE = ("yes", "no", "noanswer")
_LETTERS = string.ascii_uppercase


def f1(sample: Sample) -> float:
    """Harmonic mean of precision and recall of the response's words in the label's (SQuAD, arXiv:1606.05250, sec. 6.1).

    Case, punctuation and articles do not count. yes, no and noanswer are right or wrong as a whole.
    Example: "the red car" and "a red house" -> 1 of 2 words each way: 0.5.
    """
    response, label = _words(sample.response), _words(str(sample.label))
    if response != label and (" ".join(response) in _WHOLE or " ".join(label) in _WHOLE):
        return 0.0
    shared = sum((collections.Counter(response) & collections.Counter(label)).values())
    return 2 * shared / (len(response) + len(label)) if shared else 0.0


def gpqa(sample: Sample) -> float:
    """1 if the response names the right choice (GPQA, arXiv:2311.12022), else 0; thinking does not count.

    The label is a letter, a number (0 is A), or the text of a choice; metadata may have `choices` (a list, or letters
    with texts), `valid_letters` and `correct_letter`. A response without a letter is right if it holds the right
    choice's text.
    """
    choices = _choices(sample.metadata)
    letters = [str(letter).upper() for letter in sample.metadata.get("valid_letters") or ()]
    letters = letters or list(choices) or list(_LETTERS[:8])
    right = _right_letter(sample.label, sample.metadata, choices, letters)
    answer = sample.response.rpartition("</think>")[2]
    chosen = _chosen_letter(answer, letters)
    if chosen is not None and right is not None:
        return float(chosen == right)
    targets = [choices[right]] if right in choices else []
    targets += [str(sample.label)] if right is None else []
    said = f" {' '.join(_words(answer))} "
    return float(any(words and f" {' '.join(words)} " in said for words in map(_words, targets)))


def _choices(metadata: dict) -> dict[str, str]:
    """Letter -> text."""
    choices = metadata.get("choices") or []
    if isinstance(choices, dict):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    return {letter: str(text) for letter, text in zip(_LETTERS, choices, strict=False)}


def _right_letter(label: Any, metadata: dict, choices: dict[str, str], letters: list[str]) -> str | None:
    given = metadata.get("correct_letter")
    if given:
        return str(given).upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label).strip()
    if text.upper().strip("().") in letters:
        return text.upper().strip("().")
    return next((letter for letter, choice in choices.items() if _words(choice) == _words(text)), None)


def _chosen_letter(answer: str, letters: list[str]) -> str | None:
    """The last letter that is said to be the answer; else the last that stands alone as a choice is written."""
    one = "([" + "".join(map(re.escape, letters)) + "])"
    boxed = last_boxed(answer)
    if boxed is not None:
        match = re.fullmatch(rf"(?:\\text\s*\{{)?\(?{one}\)?[.:]?.*", boxed, re.DOTALL)
        if match:
            return match[1]
    for pattern in (
        rf"(?i:answer|choice|option)(?i:\s+is)?\s*[:=\-]?\s*\**\(?{one}\b\)?",
        rf"\({one}\)",
        rf"(?:^|\n)\s*\**{one}\**\s*(?:[.):]|$)",
        rf"(?<![A-Za-z]){one}\.?\s*$",
    ):
        matches = re.findall(pattern, answer)
        if matches:
            return matches[-1]
    return None


def _words(text: str) -> list[str]:
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()
