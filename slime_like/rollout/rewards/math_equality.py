"""Whether two final answers are equal: first as they are written, then number by number and part by part, at last by
math_verify.
"""

from __future__ import annotations

import re

from math_verify import parse, verify

from slime_like.rollout.rewards.math_notation import Number, clean, compact, is_words, number, same_unit, split_unit

_OPENING, _CLOSING = "([{", ")]}"
_WRAPPED = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_MATRIX = re.compile(
    r"[(\[]?\\begin\{(?P<kind>[pbB]?matrix|vmatrix|array)\}(?:\{[lcr|]*\})?(?P<cells>.*)\\end\{(?P=kind)\}[)\]]?",
    re.DOTALL,
)
_BASE = re.compile(r"(?P<digits>[0-9A-Za-z.]+)_\{?(?P<base>[0-9]+|[a-z]+)\}?")
_NAMED = re.compile(r"(?P<name>[A-Za-z](?:\([a-z]\)|_\{?\w\}?)?|\\[a-z]+)\s*(?:=|\\in(?![a-z]))\s*(?P<value>[^=<>]+)")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_AND = re.compile(r"\s*,?\s+(?:and|or)\s+")
#: One expression for many values: math_verify knows which interval or set it is.
_SEVERAL = re.compile(r"[<>=]|\\(?:le|ge|pm|neq?|ne)(?![a-zA-Z])")
#: A decimal of at least so many places equals a fraction that it is the rounding of.
_FEWEST_PLACES = 6
_DEEPEST = 8
#: Beyond so many characters an answer is no final one, and parsing it may take minutes.
_LONGEST = 2000


def same_answer(answer: str, label: str, *, as_written: bool = False) -> bool:
    """Whether the answer is the label.

    Tuples and intervals are compared in order and with their brackets, sets without order. A list without brackets is a
    set if it is of values, and an order if it is of names (A, B, C). A unit, sign of currency or percent sign may be
    left out; two that differ are unequal. What has more than 2000 characters must be the same text.
    as_written: as slime's: fractions must be written with the same numbers, an integer as an integer, and a list
    without brackets is an order.
    """
    if max(len(answer), len(label)) > _LONGEST:
        return answer.split() == label.split()
    return _same(clean(answer), clean(label), as_written, 0)


def _same(a: str, b: str, as_written: bool, depth: int) -> bool:
    if not a or not b or depth > _DEEPEST:
        return False
    value, other = number(a), number(b)
    if value and other:
        return _same_number(value, other, as_written)
    if compact(a) == compact(b):
        return True
    if len(a) == len(b) == 1:
        return False  # math_verify does not see that A is not a
    (name, meant), (other_name, other_meant) = _named(a), _named(b)
    if name or other_name:
        return (not name or not other_name or name == other_name) and _same(meant, other_meant, as_written, depth + 1)
    if _BASE.fullmatch(compact(a)) or _BASE.fullmatch(compact(b)):
        return _in_base(a) == _in_base(b)
    (amount, unit), (other_amount, other_unit) = split_unit(a), split_unit(b)
    if unit or other_unit:
        if _same(amount, other_amount, as_written, depth + 1):
            return same_unit(unit, other_unit)
        return {unit, other_unit} == {"%", ""} and not as_written and _same_share(amount, other_amount, unit)
    choice, other_choice = _CHOICE.fullmatch(a), _CHOICE.fullmatch(b)
    if choice and other_choice:
        return choice[1] == other_choice[1]
    if is_words(a) or is_words(b):
        return _words(a) == _words(b) or _same_lists(a, b, as_written, depth) is True
    for compare in (_same_matrices, _same_unions, _same_lists):
        verdict = compare(a, b, as_written, depth)
        if verdict is not None:
            return verdict
    if as_written and any(one and one.form == "integer" for one in (number(a), number(b))):
        return False
    return verify(_parsed(b), _parsed(a), allow_set_relation_comp=True, timeout_seconds=None)


def _parsed(text: str) -> list:
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def _words(text: str) -> str:
    return re.sub(r"[\s.]+", "", _AND.sub(",", text)).casefold()


def _named(text: str) -> tuple[str, str]:
    """("x", "5") for x = 5, and for x \\in 5; ("", text) for anything else."""
    match = _NAMED.fullmatch(text)
    return (compact(match["name"]), match["value"]) if match else ("", text)


def _in_base(text: str) -> tuple[str, str]:
    match = _BASE.fullmatch(compact(text))
    return (match["digits"].lstrip("0"), match["base"]) if match else (compact(text), "")


def _same_number(a: Number, b: Number, as_written: bool) -> bool:
    if as_written and (a.form == b.form == "ratio" or "integer" in (a.form, b.form)):
        return (a.value, a.form, a.terms) == (b.value, b.form, b.terms)
    if a.value == b.value:
        return True
    for decimal, other in ((a, b), (b, a)):
        if decimal.form == "decimal" and other.form == "ratio" and decimal.places >= _FEWEST_PLACES:
            return round(other.value, decimal.places) == decimal.value
    return False


def _same_share(value: str, other: str, unit: str) -> bool:
    """50% and 0.5. unit: that of `value`."""
    share, plain = map(number, (value, other) if unit else (other, value))
    return bool(share and plain and share.value == 100 * plain.value)


def _same_matrices(a: str, b: str, as_written: bool, depth: int) -> bool | None:
    """None if neither is a matrix. Brackets and parentheses around one mean the same, bars a determinant."""
    match, other = _MATRIX.fullmatch(a), _MATRIX.fullmatch(b)
    if not match or not other:
        return False if match or other else None
    if (match["kind"] == "vmatrix") != (other["kind"] == "vmatrix"):
        return False
    rows, others = ([row.split("&") for row in one["cells"].split("\\\\") if row.strip()] for one in (match, other))
    if [len(row) for row in rows] != [len(row) for row in others]:
        return False
    pairs = zip((cell for row in rows for cell in row), (cell for row in others for cell in row), strict=True)
    return all(_same(cell.strip(), other.strip(), as_written, depth + 1) for cell, other in pairs)


def _same_unions(a: str, b: str, as_written: bool, depth: int) -> bool | None:
    """None if neither is a union."""
    parts, others = _split(a, "\\cup"), _split(b, "\\cup")
    return None if len(parts) == len(others) == 1 else _same_sets(parts, others, as_written, depth)


def _same_lists(a: str, b: str, as_written: bool, depth: int) -> bool | None:
    """None if neither is a tuple, an interval, a set or a bare list, or one is but the other may mean the same in other
    words.
    """
    brackets, parts = _list_parts(a)
    other_brackets, others = _list_parts(b)
    if brackets is None and other_brackets is None:
        return None
    if brackets is None or other_brackets is None:
        if _SEVERAL.search((parts if brackets is None else others)[0]):
            return None
        bare = ("()",) if as_written else ("()", "\\{\\}")  # (x+1) is x+1, and the only member of {5} is 5
        return (
            len(parts) == len(others) == 1
            and (brackets or other_brackets) in bare
            and _same(parts[0], others[0], as_written, depth + 1)
        )
    if brackets != other_brackets and "" not in (brackets, other_brackets):
        return False
    if "[" in brackets + other_brackets and "" in (brackets, other_brackets):
        return False  # an interval is no list
    are_names = all(re.fullmatch(r"[A-Za-z]", part) or is_words(part) for part in parts + others)
    unordered = "\\{\\}" in (brackets, other_brackets) or (
        brackets == other_brackets == "" and not are_names and not as_written
    )
    if unordered:
        return _same_sets(parts, others, as_written, depth)
    return len(parts) == len(others) and all(
        _same(part, other, as_written, depth + 1) for part, other in zip(parts, others, strict=True)
    )


def _same_sets(parts: list[str], others: list[str], as_written: bool, depth: int) -> bool:
    """Each of the ones is one of the others, and none is left over."""
    if len(parts) != len(others):
        return False
    left = list(others)
    for part in parts:
        match = next((i for i, other in enumerate(left) if _same(part, other, as_written, depth + 1)), None)
        if match is None:
            return False
        del left[match]
    return True


def _list_parts(text: str) -> tuple[str | None, list[str]]:
    """(brackets, parts): "(1, 2]" -> ("(]", ["1", "2"]), "1, 2" -> ("", ["1", "2"]).

    (None, [text]) for what is no list.
    """
    match = _WRAPPED.fullmatch(text)
    if match and _encloses(text, len(match[1])):
        return match[1] + match[3], _elements(match[2])
    parts = _elements(_AND.sub(", ", text))
    return ("", parts) if len(parts) > 1 else (None, [text])


def _elements(text: str) -> list[str]:
    """Parts between commas; where some commas are followed by a blank, those between groups of digits belong to
    numbers: "1,000, 2" has two.
    """
    if re.search(r",\s", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return _split(text, ",")


def _encloses(text: str, length: int) -> bool:
    """Whether the first bracket (of `length` characters) is closed by the last one."""
    depth = 0
    for position, sign in enumerate(text):
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0 and position >= length - 1:
            return position == len(text) - 1
    return False


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            start = position + len(separator)
    return [*parts, text[start:].strip()]
