r"""The content of the last \boxed{…} of a text."""

from __future__ import annotations

import re

#: A brace, or what a backslash escapes: \{ and \} are printed, and need not come in pairs.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def has_box(text: str) -> bool:
    """Whether a box begins anywhere."""
    return bool(_BOX.search(text))


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}; None without one, or where it was cut off inside the braces."""
    begins = [match.end() for match in _BOX.finditer(text)]
    depth = 1
    for mark in _BRACE.finditer(text, begins[-1]) if begins else ():
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[begins[-1] : mark.start()].strip()
    return None
