"""Two buckets: what overlaps, what fails, and how many bytes are alive."""

from __future__ import annotations

import threading

import pytest
import torch
from weight_sync.alive_bytes import Alive

from slime_like.errors import EngineError
from slime_like.weight_sync.transports.slots import BucketSlot, Sending, send_in_slots, slot_bytes


def sending(send, max_bytes: int = 16) -> Sending:
    return Sending(send=send, max_bytes=max_bytes, who="test", timeout_s=5.0)


def test_slots_hold_the_bytes_of_every_tensor_in_order():
    tensors = [
        ("a", torch.arange(4.0).view(2, 2).t()),
        ("b", torch.tensor(7, dtype=torch.int16)),
        ("c", torch.ones(5, dtype=torch.bool)),
        ("d", torch.zeros(0)),
    ]
    received = {}

    def send(slot, number):
        for entry in slot.entries:
            received[entry.name] = (
                slot.filled()[entry.start : entry.stop].clone().view(getattr(torch, entry.dtype)).view(entry.shape)
            )

    report = send_in_slots(tensors, [BucketSlot(), BucketSlot()], sending(send))
    assert (report.num_tensors, report.num_bytes) == (4, 16 + 2 + 5)
    assert list(received) == ["a", "b", "c", "d"]
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors)


def test_the_next_bucket_is_filled_while_one_is_sent():
    """The first send ends only once the stream has given the second bucket's tensors: without overlap this would last
    for ever.
    """
    gathered, order = threading.Event(), []

    def stream():
        for number in range(3):
            if number == 2:
                gathered.set()
            yield f"t{number}", torch.zeros(4)

    def send(slot, number):
        assert gathered.wait(5)
        order.append([entry.name for entry in slot.entries])

    send_in_slots(stream(), [BucketSlot(), BucketSlot()], sending(send))
    assert order == [["t0"], ["t1"], ["t2"]]


def test_a_failed_send_is_raised_and_nothing_is_sent_behind_it():
    sent = []

    def send(slot, number):
        sent.append(number)
        if number == 1:
            raise EngineError("engine 0 is gone")

    with pytest.raises(EngineError, match="engine 0 is gone"):
        send_in_slots(((f"t{i}", torch.zeros(4)) for i in range(9)), [BucketSlot(), BucketSlot()], sending(send))
    assert sent == [0, 1]
    with pytest.raises(EngineError, match="engine 0 is gone"):  # in the last bucket
        send_in_slots(((f"t{i}", torch.zeros(4)) for i in range(2)), [BucketSlot(), BucketSlot()], sending(send))


def test_what_the_stream_raises_comes_out():
    def stream():
        yield "a", torch.zeros(4)
        raise RuntimeError("a neighbour died")

    with pytest.raises(RuntimeError, match="a neighbour died"):
        send_in_slots(stream(), [BucketSlot(), BucketSlot()], sending(lambda slot, number: None))


@pytest.mark.parametrize("sizes", [[100] * 200, [500] * 30, [499, 1] * 40, [300] * 50], ids=str)
def test_no_more_than_two_buckets_are_alive(sizes):
    """Tensors of up to half a bucket: the slots and the gathered tensor together stay below 2 x
    --update-weight-buffer-size.
    """
    buffer_bytes = 1000
    slots = [BucketSlot(), BucketSlot()]
    alive = Alive(slots)
    report = send_in_slots(alive.stream(sizes), slots, sending(lambda slot, number: None, slot_bytes(buffer_bytes)))
    assert report.num_bytes == sum(sizes)
    assert max(sizes) + buffer_bytes >= alive.most > buffer_bytes
    assert alive.most <= 2 * buffer_bytes


def test_room_for_a_tensor_that_is_larger_than_a_bucket_is_given_back(monkeypatch):
    monkeypatch.setattr("slime_like.weight_sync.transports.slots.SLACK_BYTES", 0)
    slots = [BucketSlot(), BucketSlot()]
    alive = Alive(slots)
    sizes = [100] * 20 + [5000] + [100] * 40
    send_in_slots(alive.stream(sizes), slots, sending(lambda slot, number: None, 500))
    assert all(slot.memory.numel() <= 500 for slot in slots)
    assert alive.most <= 2 * 5000 + 500  # its slot, itself, and the other slot


def test_buckets_begin_small_and_grow_fourfold_up_to_a_slot():
    megabyte, sizes = 1 << 20, []
    tensors = ((f"t{number}", torch.empty(4 * megabyte, dtype=torch.uint8)) for number in range(40))
    send_in_slots(
        tensors,
        [BucketSlot(), BucketSlot()],
        sending(lambda slot, number: sizes.append(slot.used // megabyte), max_bytes=48 * megabyte),
    )
    assert sizes == [8, 32, 48, 48, 24]
