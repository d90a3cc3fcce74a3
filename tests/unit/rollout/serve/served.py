"""An endpoint in a process of its own, before an engine that answers by a script."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from slime_like.testing.scripted_engine import ScriptedEngine

TINY = Path(__file__).parents[4] / "models" / "tiny-qwen3"
_START_S = 120.0


class Served:
    """url: where it answers; pid: its process; engine: what it asks."""

    def __init__(self, url: str, pid: int, engine: ScriptedEngine):
        self.url, self.pid, self.engine = url, pid, engine


@contextlib.contextmanager
def served(engine: ScriptedEngine, *flags: str, model: Path = TINY, **environment: str) -> Iterator[Served]:
    """`python -m slime_like.rollout.serve` until the block ends."""
    command = [sys.executable, "-m", "slime_like.rollout.serve", "--hf-checkpoint", str(model)]
    command += ["--engine-url", engine.url, "--serve-port", "0", "--rollout-max-context-len", "4096", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    # A process that never says where it listens is ended, and reading its output with it.
    late = threading.Timer(_START_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        late.cancel()
        match = re.fullmatch(r"serving (http\S+)/v1\n", line)
        assert match, f"the endpoint said {line!r} and ended with {process.poll()}"
        yield Served(match.group(1), process.pid, engine)
    finally:
        late.cancel()
        process.terminate()
        assert process.wait(timeout=30) == 0, "it ends by itself when it is told to"
        if process.stdout is not None:
            process.stdout.close()


def says(tokenizer, *texts: str, logprob: float = -0.5):
    """A script that answers the n-th request with the n-th text (the last again and again) and the end token."""
    number = iter(range(10**9))

    def script(_: list[int]):
        text = texts[min(next(number), len(texts) - 1)]
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return ids, [logprob - 0.01 * place for place in range(len(ids))]

    return script
