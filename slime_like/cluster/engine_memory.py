"""What engines on a trainer's cards have given back of their memory."""

from __future__ import annotations

from collections.abc import Iterable

from slime_like.sglang_backend.client import EngineClient


class EngineMemory:
    """Tags of memory ("kv_cache", "weights") that all serving engines hold, or have all given back."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    def release(self, clients: Iterable[EngineClient], tags: Iterable[str]) -> None:
        """Engines, which must be idle, give it back, where they have not yet."""
        still = [tag for tag in tags if tag not in self.released]
        for client in clients if still else ():
            if "kv_cache" not in self.released:  # else nothing is left to forget
                client.flush_cache()
            client.release_memory_occupation(still)
        self.released |= set(still)

    def resume(self, clients: Iterable[EngineClient], tag: str) -> None:
        """Engines take it again, if they had given it back."""
        if tag in self.released:
            for client in clients:
                client.resume_memory_occupation([tag])
            self.released -= {tag}
