"""A frame comes back as it was written, and whatever is wrong with one is told instead of loaded.

test_delta_store.py applies them.
"""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from slime_like.weight_sync.delta.codec import ENCODINGS, SAME, DeltaError
from slime_like.weight_sync.delta.frame import (
    NO_DIGEST,
    Change,
    FramePlace,
    TensorKey,
    read_frame,
    source_digest,
    write_frame,
)

PLACE = FramePlace(version=4, base=3, source=1, shard=0)
WHOLE = next(name for name in ENCODINGS if name not in (SAME, "xor", "overwrite"))


def change(name: str, values: list[int], *, encoding: str = WHOLE) -> Change:
    new = np.array(values, dtype=np.uint8)
    return Change(TensorKey(name, "U8", (len(values),)), encoding, NO_DIGEST, xxhash.xxh3_128_digest(new), new)


def frame(*changes: Change) -> bytearray:
    return write_frame(PLACE, changes)[0]


def test_bytes_of_a_tensor():
    assert TensorKey("w", "BF16", (3, 4)).num_bytes == 24 and TensorKey("scale", "F32", ()).num_bytes == 4


def test_what_was_written_is_read():
    content = read_frame(frame(change("a", [1, 2, 3]), change("b", [9], encoding=SAME)))
    assert (content.place, content.damage) == (PLACE, None)
    assert [(e.key.name, e.key.shape, e.encoding) for e in content.entries] == [("a", (3,), WHOLE), ("b", (1,), SAME)]
    assert [len(payload) for payload in content.payloads] == [e.payload_bytes for e in content.entries]
    assert len(content.payloads[0]) > 0 and len(content.payloads[1]) == 0  # what is the same needs no bytes


def test_a_flipped_bit_is_damage():
    data = frame(change("a", [1, 2, 3]))
    data[-17] ^= 1  # the last byte of the payload
    assert "its digest is" in read_frame(data).damage


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is no frame"),
        (b"PK\x03\x04" + bytes(64), "it is no frame"),
        (frame(change("a", [1, 2, 3]))[:60], "header is damaged"),
        (frame(change("a", [1, 2, 3])) + b"more", "bytes, but .* are there"),
        (frame(change("a", [1]), change("a", [2])), "a tensor is in it twice"),
        (frame(change("two\nlines", [1])), "a tensor's name"),
        (frame(change("__metadata__", [1])), "a tensor's name"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, message: str):
    with pytest.raises(DeltaError, match=message):
        read_frame(data)


def test_a_sources_digest_depends_on_place_name_shape_and_content():
    key, digest = TensorKey("a", "U8", (2,)), bytes(range(16))
    others = [
        [(1, [(key, digest)])],
        [(0, [(TensorKey("b", "U8", (2,)), digest)])],
        [(0, [(TensorKey("a", "U8", (1, 2)), digest)])],
        [(0, [(key, bytes(16))])],
        [(0, [(key, digest), (key, digest)])],
    ]
    assert len({source_digest(shards) for shards in [[(0, [(key, digest)])], *others]}) == 6
    assert source_digest([(0, [(key, digest)])]) == source_digest(iter([(0, ((key, digest),))]))
