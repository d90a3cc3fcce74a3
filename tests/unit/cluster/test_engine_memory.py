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
    assert client.calls == []
    memory.release([client], ("kv_cache", "weights"))
    assert client.calls == ["flush", ("release", "kv_cache", "weights")] and memory.released == {"kv_cache", "weights"}
    memory.resume([client], "weights")
    memory.resume([client], "weights")
    assert client.calls[2:] == [("resume", "weights")] and memory.released == {"kv_cache"}
