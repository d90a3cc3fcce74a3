"""A scripted engine in a process of its own: python tests/e2e/chaos/scripted_server.py PORT.

The answer follows from the prompt and the sampling seed, takes a little while, and is held while generation is paused.
"""

from __future__ import annotations

import random
import signal
import sys

from slime_like.testing.scripted_engine import Fault, ScriptedEngine

#: Of the tiny tokenizer's plain tokens.
_TOKENS = range(3, 290)
_SECONDS = 0.03


class SeededEngine(ScriptedEngine):
    """Its script sees the whole request, seed and all."""

    def _answer(self, body: dict, request_id: str, *, abort_after: int | None) -> dict:
        chosen = random.Random(f"{body['sampling_params'].get('sampling_seed')} {body['input_ids']}")
        ids = [chosen.choice(_TOKENS) for _ in range(8)]
        self.script = lambda _: (ids, [-0.5] * len(ids))
        return super()._answer(body, request_id, abort_after=abort_after)


if __name__ == "__main__":
    with SeededEngine(lambda _: ([], []), fault_for=lambda _: Fault(delay_s=_SECONDS), port=int(sys.argv[1])):
        signal.pause()
