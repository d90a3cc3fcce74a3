"""Which host memory is page-locked, and that it is unlocked when its last view is gone. The lock is a list."""

from __future__ import annotations

import gc

import torch

from slime_like.megatron_backend.host_memory import host_memory

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")


class Lock:
    """Writes down what it is asked to lock and unlock."""

    def __init__(self, failure: str | None = None):
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []
        self.failure = failure

    def __call__(self, address: int, num_bytes: int):
        if self.failure:
            raise RuntimeError(self.failure)
        self.locked.append((address, num_bytes))
        return lambda: self.unlocked.append(address)


def test_copies_of_a_cards_memory_are_locked_exactly_and_unlocked_with_the_last_view():
    lock = Lock()
    memory = host_memory(100_001, CUDA, lock)
    assert lock.locked == [(memory.data_ptr(), 100_001)] and memory.device == HOST
    view = memory[5:].view(torch.uint8)
    del memory
    gc.collect()
    assert lock.unlocked == []
    view.fill_(7)
    address = lock.locked[0][0]
    del view
    gc.collect()
    assert lock.unlocked == [address]


def test_without_a_card_and_for_nothing_no_page_is_locked():
    lock = Lock()
    assert host_memory(10, HOST, lock).numel() == 10 and host_memory(0, CUDA, lock).numel() == 0
    assert lock.locked == []


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog):
    memory = host_memory(2**20, CUDA, Lock("out of memory"))
    assert memory.numel() == 2**20
    assert "could not be page-locked" in caplog.text and "out of memory" in caplog.text
