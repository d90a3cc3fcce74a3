"""What a body may cost, before it is known what it says."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import zstandard

from slime_like.tinker.api.wire.bounds import BodyLimits, check_counts, inflate
from slime_like.tinker.api.wire.messages import MESSAGES
from slime_like.tinker.errors import Refused


def test_a_body_comes_out_as_it_went_in():
    plain = b"abc" * 1000
    assert inflate(zstandard.compress(plain), "zstd", 3000) == plain
    assert inflate(plain, None, 1) is plain  # whoever read it has counted it
    two_frames = zstandard.compress(plain) + zstandard.compress(plain)
    assert inflate(two_frames, "zstd", 6000) == plain + plain


def test_a_bomb_is_refused_without_its_bytes():
    bomb = zstandard.compress(b"\0" * 2**30, 3)
    assert len(bomb) < 2**17
    tracemalloc.start()
    with pytest.raises(Refused, match="longer than 1048576 bytes") as refused:
        inflate(bomb, "zstd", 2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.value.status == 413 and peak < 8 * 2**20


@pytest.mark.parametrize(("body", "encoding", "status"), [(b"no zstd", "zstd", 400), (b"", "br", 415)])
def test_what_cannot_be_decompressed_is_refused(body: bytes, encoding: str, status: int):
    with pytest.raises(Refused) as refused:
        inflate(body, encoding, 100)
    assert refused.value.status == status


def test_messages_are_counted_before_they_are_built():
    limits = BodyLimits(datums=10, parts=5)
    request = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=2**31 - 1, loss_fn="ppo")
    for _ in range(10):
        request.data.add().model_input.add()
    check_counts(request.SerializeToString(), limits)
    request.data.add()
    with pytest.raises(Refused, match="more than 10 datums"):
        check_counts(request.SerializeToString(), limits)
    del request.data[1:]
    for _ in range(5):
        request.data[0].model_input.add()
    with pytest.raises(Refused, match="datum 0 has more than 5 parts"):
        check_counts(request.SerializeToString(), limits)


def test_a_body_of_empty_messages_is_refused_at_once():
    began = time.perf_counter()
    with pytest.raises(Refused) as refused:
        check_counts(b"\x1a\x00" * 10_000_000, BodyLimits())
    assert refused.value.status == 413 and time.perf_counter() - began < 1


@pytest.mark.parametrize(
    "body", [b"\x1a", b"\x1a\xff", b"\x1a\x05ab", b"\x08" + b"\xff" * 11, b"\x0b", b"\x09\x00", b"\x1a\x02\x0a\x05"]
)
def test_a_torn_body_is_refused(body: bytes):
    with pytest.raises(Refused) as refused:
        check_counts(body, BodyLimits())
    assert refused.value.status == 400
