"""The copy beside an engine is always one whole version, byte for byte, and says why it refuses."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import load_file

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.delta.codec import SAME, WHOLE, XOR, DeltaError, digest
from slime_like.weight_sync.delta.frame import (
    NO_DIGEST,
    Change,
    FramePlace,
    TensorKey,
    read_frame,
    source_digest,
    write_frame,
)
from slime_like.weight_sync.delta.store import NotInStepError, VersionStore

KEYS = [
    TensorKey("a.weight", "F32", (3, 4)),
    TensorKey("b.bias", "F32", (5,)),
    TensorKey("empty", "F32", (0, 4)),
    TensorKey("c.scale", "U8", (7,)),
]
LIMIT = 1 << 20


def contents(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, key.num_bytes, dtype=np.uint8) for key in KEYS]


def frame_of(place: FramePlace, new: list[np.ndarray], old: list[np.ndarray] | None) -> bytearray:
    changes = []
    for number, key in enumerate(KEYS):
        before = None if old is None else old[number]
        if before is None:
            changes.append(Change(key, WHOLE, NO_DIGEST, digest(new[number]), new[number]))
        else:
            encoding = SAME if before.tobytes() == new[number].tobytes() else XOR
            changes.append(Change(key, encoding, digest(before), digest(new[number]), new[number], before))
    return write_frame(place, changes)[0]


def share(new: list[np.ndarray]) -> str:
    return source_digest([(0, [(key, digest(data)) for key, data in zip(KEYS, new, strict=True)])])


def receive(
    store: VersionStore, version: int, new: list[np.ndarray], old: list[np.ndarray] | None, base: int | None
) -> str:
    store.begin(version)
    store.apply(frame_of(FramePlace(version, base, 0, 0), new, old))
    store.finish(version, 0, num_sources=1, num_shards=1, expected=share(new))
    return store.commit(version).folder


def assert_holds(folder: str, expected: list[np.ndarray]) -> None:
    tensors = load_file(os.path.join(folder, "model-000-00000.safetensors"))
    assert set(tensors) == {key.name for key in KEYS}
    for key, data in zip(KEYS, expected, strict=True):
        assert tensors[key.name].tobytes() == data.tobytes() and tensors[key.name].shape == key.shape


@pytest.fixture
def store(tmp_path):
    opened = VersionStore(str(tmp_path / "copy"), max_shard_bytes=LIMIT)
    yield opened
    opened.close()


def test_three_versions_and_only_the_last_is_kept(store):
    first, second = contents(1), contents(2)
    assert_holds(receive(store, 1, first, None, None), first)
    second[1] = first[1]
    folder = receive(store, 2, second, first, 1)
    assert_holds(folder, second)
    inode = os.stat(os.path.join(folder, "model-000-00000.safetensors")).st_ino
    folder = receive(store, 3, second, second, 2)
    assert os.stat(os.path.join(folder, "model-000-00000.safetensors")).st_ino == inode, (
        "an unchanged shard is a link, not a copy"
    )
    assert store.state() == {"version": 3, "folder": folder, "sources": {"0": share(second)}}
    assert sorted(name for name in os.listdir(store.directory) if not name.startswith(".")) == [
        os.path.basename(folder)
    ]


def test_a_flip_of_any_byte_is_refused_and_nothing_is_half_applied(store):
    first, second = contents(1), contents(1)
    for data, place in zip(second, (5, 17, None, 3), strict=True):
        if place is not None:
            data[place] ^= 0x40
    folder = receive(store, 1, first, None, None)
    frame = frame_of(FramePlace(2, 1, 0, 0), second, first)
    named = 0
    for at in range(len(frame)):
        broken = frame.copy()
        broken[at] ^= 0x10
        store.begin(2)
        with pytest.raises((DeltaError, NotInStepError)) as refused:
            store.apply(broken)
        named += any(key.name in str(refused.value) for key in KEYS) and "it must be" in str(refused.value)
        assert os.listdir(os.path.join(store.directory, ".staging")) == []
    assert named > 4 * 32 / 2, "a flip in a tensor's digests or bytes names the tensor, with both digests"
    for end in range(0, len(frame), 7):
        with pytest.raises((DeltaError, NotInStepError)):
            store.apply(frame[:end])
    assert store.state()["version"] == 1
    assert_holds(folder, first)
    store.begin(2)
    store.apply(frame)


def test_what_is_on_the_disk_is_checked_before_it_is_changed(store):
    first, second = contents(1), contents(2)
    folder = receive(store, 1, first, None, None)
    path = os.path.join(folder, "model-000-00000.safetensors")
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - 1)
        file.write(bytes([first[3][-1] ^ 1]))
    store.begin(2)
    message = (
        r"version 2, source 0, shard 0, c\.scale: before the change its digest is [0-9a-f]{32}, it must be "
        + digest(first[3]).hex()
    )
    with pytest.raises(DeltaError, match=message):
        store.apply(frame_of(FramePlace(2, 1, 0, 0), second, first))


def test_what_does_not_follow_is_refused(store):
    first, second = contents(1), contents(2)
    whole = frame_of(FramePlace(1, None, 0, 0), first, None)
    with pytest.raises(NotInStepError, match="no sync has begun"):
        store.apply(whole)
    store.begin(1)
    with pytest.raises(NotInStepError, match="starts from version 4, here is None"):
        store.apply(frame_of(FramePlace(1, 4, 0, 0), second, first))
    with pytest.raises(NotInStepError, match="version 1 is being received"):
        store.apply(frame_of(FramePlace(2, None, 0, 0), second, None))
    store.apply(whole)
    with pytest.raises(NotInStepError, match="is not complete"):
        store.commit(1)
    with pytest.raises(DeltaError, match="digest"):
        store.finish(1, 0, num_sources=2, num_shards=1, expected=share(second))
    with pytest.raises(DeltaError, match="1 of 2 shards"):
        store.finish(1, 0, num_sources=2, num_shards=2, expected=share(first))
    store.finish(1, 0, num_sources=2, num_shards=1, expected=share(first))
    with pytest.raises(NotInStepError, match=r"sources \[0\] of 2"):
        store.commit(1)
    assert store.state()["version"] is None


def test_a_tensor_of_two_sources_is_refused(store):
    data = contents(1)
    store.begin(1)
    for source in (0, 1):
        store.apply(frame_of(FramePlace(1, None, source, 0), data, None))
        store.finish(1, source, num_sources=2, num_shards=1, expected=share(data))
    with pytest.raises(DeltaError, match="a.weight was sent twice"):
        store.commit(1)


def test_a_shard_beyond_the_bound_is_refused_before_it_is_written(tmp_path):
    store = VersionStore(str(tmp_path), max_shard_bytes=50)
    store.begin(1)
    with pytest.raises(DeltaError, match="75 bytes of tensors, at most 50 are taken"):
        store.apply(frame_of(FramePlace(1, None, 0, 0), contents(1), None))


def peak_bytes(act) -> int:
    """Memory that `act` takes at most, beyond what was there; it must be refused."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightSyncError):
            act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_numbers_of_a_finish_are_compared_and_nothing_is_made_as_large_as_they_say(store):
    new, many = contents(1), 2_000_000  # as a list: 16 MB, and 64 MB with its numbers
    store.begin(1)
    store.apply(frame_of(FramePlace(1, None, 0, 0), new, None))
    for numbers in ({"num_sources": 1, "num_shards": many}, {"num_sources": many, "num_shards": 1}):
        assert peak_bytes(lambda numbers=numbers: store.finish(1, 0, **numbers, expected=share(new))) < 1 << 20
    with pytest.raises(DeltaError, match=r"source 3 of 2 of version 1: at most 1000 are taken, counted from 0"):
        store.finish(1, 3, num_sources=2, num_shards=0, expected="")
    store.finish(1, 0, num_sources=2, num_shards=1, expected=share(new))
    with pytest.raises(DeltaError, match="knows 3 sources, the one before knew 2"):
        store.finish(1, 1, num_sources=3, num_shards=0, expected=source_digest([]))
    with pytest.raises(NotInStepError, match=r"sources \[0\] of 2"):
        store.commit(1)
    store.finish(1, 1, num_sources=2, num_shards=0, expected=source_digest([]))
    assert_holds(store.commit(1).folder, new)


def test_places_and_versions_beyond_their_digits_are_refused(store):
    with pytest.raises(NotInStepError, match="at most 99999999 are counted"):
        store.begin(10**8)
    store.begin(1)
    for place in (FramePlace(1, None, 1000, 0), FramePlace(1, None, 0, 100_000)):
        with pytest.raises(DeltaError, match="at most 1000 sources with 100000 shards each"):
            store.apply(frame_of(place, contents(1), None))


def sealed(text: bytes, payloads: bytes = b"") -> bytes:
    """A frame with this header, as write_frame builds it."""
    packed = zstandard.ZstdCompressor(level=9, write_content_size=False).compress(text)
    head = b"SLDELTA1" + struct.pack("<II", len(packed), len(text)) + packed + payloads
    return head + xxhash.xxh3_128_digest(head)


@pytest.mark.parametrize(
    "text", [b"[1,null,0,0,[" + b"[]," * 200_000 + b"[]]]", b"[1,null,0,0,[" + b"1," * 200_000 + b"1]]", b"[" * 3000]
)
def test_a_small_frame_does_not_become_a_large_header(text):
    frame = sealed(text)
    assert len(frame) < 1000
    assert peak_bytes(lambda: read_frame(frame)) < 1 << 20


def test_the_largest_of_names_and_shapes_is_read():
    keys = [TensorKey(f"{number:03d}" + "\N{GRINNING FACE}" * 509, "F32", (1,) * 16) for number in range(20)]
    data = np.zeros(4, np.uint8)
    frame, _ = write_frame(
        FramePlace(1, None, 0, 0), [Change(key, WHOLE, NO_DIGEST, digest(data), data) for key in keys]
    )
    assert [entry.key for entry in read_frame(frame).entries] == keys


def test_the_state_survives_a_restart_and_damage_does_not(tmp_path):
    directory = str(tmp_path / "copy")
    first, second = contents(1), contents(2)
    store = VersionStore(directory, max_shard_bytes=LIMIT)
    with pytest.raises(WeightSyncError, match="another receiver"):
        VersionStore(directory, max_shard_bytes=LIMIT)
    receive(store, 1, first, None, None)
    state = store.state()
    store.begin(2)  # torn: never completed
    store.apply(frame_of(FramePlace(2, 1, 0, 0), second, first))
    store.close()
    store = VersionStore(directory, max_shard_bytes=LIMIT)
    assert store.state() == state
    assert not os.path.exists(os.path.join(directory, ".staging"))
    folder = receive(store, 2, second, first, 1)
    assert_holds(folder, second)
    store.close()
    path = os.path.join(folder, "model-000-00000.safetensors")
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - 1)
        file.write(bytes([second[3][-1] ^ 1]))
    store = VersionStore(directory, max_shard_bytes=LIMIT)
    assert store.state()["version"] is None, "a bit flipped while it was down: everything has to be sent again"
    store.close()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (TensorKey("../../evil\n", "F32", (1,)), "name"),
        (TensorKey("__metadata__", "F32", (1,)), "name"),
        (TensorKey("x", "F32", (-1, -1)), "no count"),
        (TensorKey("x", "F32", (True,)), "no count"),
    ],
)
def test_a_header_of_another_making_is_refused(key, message):
    frame, _ = write_frame(FramePlace(1, None, 0, 0), [Change(key, WHOLE, NO_DIGEST, bytes(16), np.zeros(4, np.uint8))])
    with pytest.raises(DeltaError, match=message):
        read_frame(frame)


def test_the_same_tensor_twice_in_a_frame_is_refused():
    change = Change(KEYS[1], WHOLE, NO_DIGEST, bytes(16), np.zeros(20, np.uint8))
    frame, _ = write_frame(FramePlace(1, None, 0, 0), [change, change])
    with pytest.raises(DeltaError, match="twice"):
        read_frame(frame)


def test_the_digest_is_xxh3_128_over_everything_before_it():
    frame = frame_of(FramePlace(1, None, 0, 0), contents(1), None)
    assert bytes(frame[-16:]) == xxhash.xxh3_128_digest(bytes(frame[:-16]))
    assert read_frame(frame).damage is None
