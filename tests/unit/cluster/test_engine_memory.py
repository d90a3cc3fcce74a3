"""Memory that engines give back and take again."""

from __future__ import annotations

from slime_like.cluster.engine_memory import EngineMemory


class Client:
    """Notes what it is asked."""

    def __init__(self):
        self.calls: list = []

    def flush_cache(self):
        self.calls.append("flush")

    def release_memory_occupation(self, tags):
        self.calls.append(("release", *tags))

    def resume_memory_occupation(self, tags):
        self.calls.append(("resume", *tags))


def test_each_part_comes_back_once_and_only_what_was_given():
    memory, client = EngineMemory(), Client()
    memory.resume([client], "weights")
    assert client.calls == [] and not memory.is_released([client])
    memory.release([client], ("kv_cache", "weights"))
    memory.release([client], ("kv_cache", "weights"))
    assert client.calls == ["flush", ("release", "kv_cache", "weights")] and memory.is_released([client])
    memory.resume([client], "weights")
    memory.resume([client], "weights")
    assert client.calls[2:] == [("resume", "weights")] and memory.is_released([client])
    memory.release([client], ("kv_cache", "weights"))
    assert client.calls[3:] == [("release", "weights")]


def test_an_engine_that_comes_while_others_have_given_theirs_back_is_not_asked_for_it():
    """It takes the place of a dead one in the sync between a train step and the next rollout."""
    memory, dead, new = EngineMemory(), Client(), Client()
    memory.release([dead], ("kv_cache", "weights"))
    memory.resume([], "weights")
    memory.resume([new], "kv_cache")
    assert new.calls == [] and not memory.is_released([new])
    memory.release([new], ("kv_cache", "weights"))
    assert new.calls == ["flush", ("release", "kv_cache", "weights")]
