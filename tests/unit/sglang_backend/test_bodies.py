"""Pieces of a body are its JSON, and its length is known before."""

from __future__ import annotations

import base64
import json

import pytest

from slime_like.sglang_backend.bodies import Body


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, 2_000_000])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"name": "policy@7", "sums": {"a": "b"}}], ids=["alone", "beside"])
def test_a_payload_is_base64_in_the_json(fields, copies, size):
    payload = bytes(number * 7 % 251 for number in range(size))
    body = Body(fields, "tensors", payload, copies=copies)
    pieces = list(body)
    assert len(body) == sum(map(len, pieces)) and max(map(len, pieces)) <= 4 << 18
    assert json.loads(b"".join(pieces)) == fields | {"tensors": [base64.b64encode(payload).decode()] * copies}
    assert list(body) == pieces  # whoever sends it again


def test_a_plain_body_is_the_object():
    fields = {"text": "é" * 1_000_000, "list": [1, None]}
    body = Body(fields)
    assert json.loads(b"".join(body)) == fields and len(body) == len(b"".join(body)) and len(list(body)) == 3
    assert b"".join(Body({})) == b"{}"
