"""Rows of the sorting task, and which of them a rollout has."""

from __future__ import annotations


def digits_row(number: int) -> dict:
    """`sort 0042` with its answer."""
    digits = f"{number:04d}"
    return {"prompt": [{"role": "user", "content": f"sort {digits}"}], "label": "".join(sorted(digits))}


def indexes(result) -> list[int]:
    """Prompt index of each group of a rollout."""
    return [group.prompt.index for group in result.groups]
