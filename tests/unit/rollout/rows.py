"""Rows of the sorting task."""

from __future__ import annotations


def digits_row(number: int) -> dict:
    """`sort 0042` with its answer."""
    digits = f"{number:04d}"
    return {"prompt": [{"role": "user", "content": f"sort {digits}"}], "label": "".join(sorted(digits))}
