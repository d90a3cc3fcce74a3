"""What engines on a trainer's cards have given back of their memory."""

from __future__ import annotations

from collections.abc import Iterable

from slime_like.sglang_backend.client import EngineClient


class EngineMemory:
    """Tags of memory ("kv_cache", "weights") that each engine has given back: one that came meanwhile holds its own."""

    def __init__(self) -> None:
        self._released: dict[EngineClient, frozenset[str]] = {}

    def is_released(self, clients: Iterable[EngineClient]) -> bool:
        """Whether any of these has given something back."""
        return any(self._released.get(client) for client in clients)

    def release(self, clients: Iterable[EngineClient], tags: Iterable[str]) -> None:
        """Engines, which must be idle, give it back, where they have not yet."""
        wanted = tuple(tags)
        for client in clients:
            before = self._released.get(client, frozenset())
            still = [tag for tag in wanted if tag not in before]
            if not still:
                continue
            if "kv_cache" not in before:  # else nothing is left to forget
                client.flush_cache()
            client.release_memory_occupation(still)
            self._released[client] = before | set(still)

    def resume(self, clients: Iterable[EngineClient], tag: str) -> None:
        """Engines take it again, if they had given it back: SGLang ends at the question otherwise."""
        for client in clients:
            before = self._released.get(client, frozenset())
            if tag in before:
                client.resume_memory_occupation([tag])
                self._released[client] = before - {tag}
