"""What clients call external weights: the files of sampler weights, under a name of their own.

A request for them says so in its id, so that its answer does too, whichever process of the server gives it.
"""

from __future__ import annotations

from typing import Any

FOLDER, SAME_AS = "external_weights", "sampler_weights"
_MARK = "~external"


def mark(request_id: str) -> str:
    """The id that the client gets."""
    return request_id + _MARK


def unmark(request_id: str) -> tuple[str, bool]:
    """The service's id, and whether external weights were asked for."""
    plain = request_id.removesuffix(_MARK)
    return plain, plain != request_id


def answer(result: dict[str, Any]) -> dict[str, Any]:
    """The path as clients know it."""
    path = str(result["path"]).replace(f"/{SAME_AS}/", f"/{FOLDER}/")
    return {**result, "path": path, "type": "save_weights_external"}
