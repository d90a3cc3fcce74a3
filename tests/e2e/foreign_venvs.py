"""Virtual environments of agent libraries, and what their renderers want of a tokenizer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from slime_like.rollout.tokenizer import load_tokenizer

#: Tokens that verifiers' renderer of Qwen3 looks for.
QWEN3_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


class ForeignPythons:
    """Interpreters by what is installed beside them, each made once below `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __call__(self, requirement: str) -> str:
        """The interpreter of a virtual environment that has the package."""
        home = self._folder / re.sub("[^a-z0-9]+", "-", requirement.lower()).strip("-")
        done = home / "installed"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, timeout=120)
            pip = [f"{home}/bin/python", "-m", "pip", "install", "--quiet", requirement]
            subprocess.run(pip, check=True, timeout=600)
            done.touch()
        return f"{home}/bin/python"


def with_qwen3_tokens(folder: Path):
    """Give the tokenizer in a model's folder the tokens of Qwen3 that it lacks; returns it."""
    tokenizer = load_tokenizer(str(folder))
    missing = [token for token in QWEN3_TOKENS if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(missing, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer
