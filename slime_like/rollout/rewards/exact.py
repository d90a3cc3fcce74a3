"""The strictest reward: the whole answer, and nothing but the answer."""

from __future__ import annotations

from slime_like.records import COMPLETED, Sample


def exact(sample: Sample) -> float:
    """1 if the response is the label (outer blanks aside) and the model ended it itself, else 0.

    Special tokens must be left out of the response (--rollout-skip-special-tokens, the default).
    A cut-off response earns nothing, even if its text fits: otherwise a model need not learn to stop.
    """
    return float(sample.status == COMPLETED and sample.response.strip() == str(sample.label).strip())
