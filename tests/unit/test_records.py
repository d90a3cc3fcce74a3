"""What is checked about the records themselves."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.records import routing_fault


def experts_of(*tokens) -> np.ndarray:
    """[T, 2 layers, 3 experts]; layer 0 has none and says zeros."""
    return np.array([[[0, 0, 0], token] for token in tokens], dtype=np.int8)


def test_different_experts_of_the_model_are_right():
    assert routing_fault(experts_of([4, 0, 2], [-1, -1, -1], [1, 2, 3]), [1], 5) is None
    assert routing_fault(experts_of([4, 0, 2])[:0], [1], 5) is None
    assert routing_fault(np.zeros((4, 2, 1), np.int8), [0, 1], 5) is None, "one expert a token may be expert 0"


@pytest.mark.parametrize("wrong", [[0, 0, 0], [1, 2, 1], [1, 2, 5], [-1, 1, 2], [3, -1, 2]])
def test_what_is_wrong_is_named(wrong):
    fault = routing_fault(experts_of([4, 0, 2], wrong, [-1, -1, -1], wrong), [1], 5)
    assert fault == f"layer 1, token 1 has the experts {wrong}, not 3 different ones of 0 to 4 (2 such tokens and layers)"


def test_only_layers_with_experts_count():
    whole = experts_of([4, 0, 2])
    assert routing_fault(whole, [0, 1], 5).startswith("layer 0, token 0 has the experts [0, 0, 0]")
    assert routing_fault(whole, [], 5) is None
