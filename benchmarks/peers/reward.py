"""`--custom-rm-path benchmarks.peers.reward.reward`: what the other side's reward function says, too."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import work


def reward(args: Any, sample: Any) -> float:
    """Of the answer's text."""
    return work.reward(sample.response)
