"""One way to write a final answer: what LaTeX and plain text leave open about spaces, styles, signs of currency, units
and numbers.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

_UNICODE = {
    "−": "-",
    "–": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "∅": "\\emptyset ",
    "°": "^\\circ ",
    "∪": "\\cup ",
}
_UNICODE |= {"≤": "\\le ", "≥": "\\ge ", "£": "\\text{ pounds }", "€": "\\text{ euros }", "\u00a0": " "}
_STYLES = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname|mbox|bf|rm)\s*\{([^{}]*)\}"
)
_REWRITTEN = [
    # thin spaces, sizes of brackets
    (
        re.compile(
            r"(?<!\\)\\[,;:!>]|\\(?:left|right)(?![a-zA-Z])\.?|\\(?:[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])"
        ),
        "",
    ),
    (re.compile(r"(?<!\\)\\ |~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\l[bB]race(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\r[bB]race(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:leq|le)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\(?:geq|ge)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\bdegrees?\b)"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})"), ""),  # 1{,}000
    (re.compile(r"\\%"), "%"),
]
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))

_PLAIN = r"\d+(?:\.\d*)?|\.\d+"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([, ])\d{3}(?:\1\d{3})*(?:\.\d+)?")
_NOT_BETWEEN_DIGITS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_DECIMAL = re.compile(
    rf"(?P<digits>[+-]?(?:{_PLAIN}))(?:(?:[eE]|(?:\\times|\\cdot|\*)10\^)\{{?(?P<power>[+-]?\d{{1,4}})\}}?)?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?)10\^\{?(?P<power>[+-]?\d{1,4})\}?")
_RATIO = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>\d+)(?:\s+|(?=\\frac)))?(?:\\frac\{{(?P<a>-?(?:{_PLAIN}))\}}\{{(?P<b>{_PLAIN})\}}|(?P<c>\d+)/(?P<d>\d+))"
)
#: Beyond these powers of ten a number is left to sympy.
_MOST_POWER = 400

_UNIT = re.compile(
    r"(?P<value>.*(?:[\d)}%]|\\pi(?![a-zA-Z])))(?P<gap>\s*)(?P<unit>%|[A-Za-z][A-Za-z."
    r" ]*[A-Za-z.]?(?:/[A-Za-z]+)?(?:\s*\^\s*\{?-?\d\}?)?)"
)
_LETTER_UNITS = frozenset("m s g h l".split())
_SHORT_UNITS = frozenset("mm cm dm km kg mg ml ft in yd mi lb lbs oz mph kph hr hrs min sec".split())
_UNIT_NAMES = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "metre": "m", "kilometer": "km", "centimetre": "cm",
    "kilometre": "km", "inches": "in", "inch": "in",
    "feet": "ft", "foot": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h",
    "hr": "h", "gram": "g",
    "kilogram": "kg", "pound": "lb", "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml", "percent": "%",
    "pct": "%",
}  # fmt: skip
#: Say only that there is a unit.
_NAMELESS_UNITS = ("", "unit", "unit^2", "unit^3")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc log ln lg exp sqrt frac pi inf infty min max gcd lcm mod arcsin arccos arctan sinh cosh"
    " tanh".split()
)
_RUN_OF_LETTERS = re.compile(r"(?<![\\\dA-Za-z])[^\W\d_]{2,}")


def clean(text: str) -> str:
    """The answer without what does not change its meaning: delimiters, spacing, styles, the final full stop; one
    spelling of what has several.

    A sign of currency becomes a unit behind the number. Examples: "$\\dfrac12.$" -> "\\frac{1}{2}", "\\$36" -> "36
    dollars", "\\text{Yes}" -> "Yes".
    """
    text = text.strip().rstrip(".,; ")
    for begin, end in _DELIMITERS:
        if (
            len(text) > len(begin) + len(end)
            and text.startswith(begin)
            and text.endswith(end)
            and not text.endswith("\\$")
        ):
            text = text[len(begin) : -len(end)].strip()
    for sign, spelled in _UNICODE.items():
        text = text.replace(sign, spelled)
    currency = re.match(r"([+-]?)\s*\\?\$\s*(?=[\d.])", text)
    if currency:
        text = f"{currency[1]}{text[currency.end() :]} dollars"
    text = text.replace("\\$", "").replace("$", "")
    while (plain := _STYLES.sub(r" \1 ", text)) != text:
        text = plain
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(".,; ")
    while text.startswith("{") and text.endswith("}") and _closes_at(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closes_at(text: str, start: int) -> int:
    """Where the brace opened at `start` is closed; -1 nowhere."""
    depth = 0
    for mark in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.start()
    return -1


def compact(text: str) -> str:
    """Without blanks, except where one keeps a command from a letter or a digit from another."""
    return _NOT_BETWEEN_DIGITS.sub("", re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\0", text)).replace("\0", " ")


@dataclasses.dataclass(frozen=True)
class Number:
    """An exact number, and how it was written. places: digits after the point of a decimal.

    terms: whole, numerator and denominator of a ratio.
    """

    value: Fraction
    form: str  # "integer", "decimal", "ratio"
    places: int = 0
    terms: tuple[Fraction, Fraction, Fraction] | None = None


def number(text: str) -> Number | None:
    """A cleaned text as a number; None if it is none.

    Integers and decimals with thousands separators, 4.2e1, 4.2 \\times 10^{1}, fractions a/b and \\frac{a}{b}, mixed
    numbers (3\\frac{1}{2} is 3 + 1/2).
    """
    text = text.strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    tight = _NOT_BETWEEN_DIGITS.sub("", text)
    if match := _DECIMAL.fullmatch(tight):
        power = int(match["power"] or 0)
        if abs(power) > _MOST_POWER:
            return None
        digits = match["digits"]
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** power
        if value.denominator == 1:
            return Number(value, "integer")
        return Number(value, "decimal", max(0, len(digits.partition(".")[2]) - power))
    if match := _POWER_OF_TEN.fullmatch(tight):
        power = int(match["power"])
        return (
            Number(Fraction(match["sign"] + "1") * Fraction(10) ** power, "decimal")
            if abs(power) <= _MOST_POWER
            else None
        )
    if match := _RATIO.fullmatch(
        re.sub(r"\s*([{}/])\s*", r"\1", re.sub(r"^([+-])\s+", r"\1", text)).replace("\\frac {", "\\frac{")
    ):
        terms = Fraction(match["whole"] or 0), Fraction(match["a"] or match["c"]), Fraction(match["b"] or match["d"])
        whole, above, below = terms
        if not below or (whole and above < 0):
            return None
        sign = Fraction(match["sign"] + "1")
        return Number(sign * (whole + above / below), "ratio", terms=(sign * whole, sign * above, below))
    return None


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit) of a cleaned text, the unit by one name: "5 centimeters" -> ("5", "cm"), "3x" -> ("3x", "")."""
    text = re.sub(
        r"\b([Ss]q(?:uare|\.)?|cubic)\s+([A-Za-z]+)",
        lambda match: f"{match[2]}^{3 if match[1] == 'cubic' else 2}",
        text,
    )
    match = _UNIT.fullmatch(text)
    if not match or is_words(match["value"]):
        return text, ""
    written = match["unit"].strip(" .")
    names, caret, power = re.sub(r"[{}.]|\s+(?=\^)|(?<=\^)\s+", "", written).partition("^")
    words, base = names.split(), re.sub(r"\s", "", names)
    apart = match["gap"] and all(
        word in _LETTER_UNITS or len(word) > 1 and word.lower() not in FUNCTIONS for word in words
    )
    if not (written == "%" or base.lower() in _SHORT_UNITS or apart):
        return text, ""
    base = base.lower()
    singular = base[:-1] if len(base) > 2 and base.endswith("s") and base not in _UNIT_NAMES else base
    return match["value"].strip(), _UNIT_NAMES.get(singular, singular) + caret + power


def same_unit(a: str, b: str) -> bool:
    """Whether two units are one, or one of the answers names none. A percent sign may be left out, too."""
    return a == b or a in _NAMELESS_UNITS or b in _NAMELESS_UNITS


def is_words(text: str) -> bool:
    """Whether a cleaned text is language and no formula: "Tuesday, May 3", but neither "2ab" nor "sin x"."""
    if re.search(r"[\\^_={}+*/<>|]", text):
        return False
    return any(run.lower() not in FUNCTIONS for run in _RUN_OF_LETTERS.findall(text))
