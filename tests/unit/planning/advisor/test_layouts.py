"""What is asked for, and the size of an engine; test_advise.py has the exercises that whole proposals answer."""

from __future__ import annotations

import pytest

from slime_like.errors import ConfigError
from slime_like.planning.advisor.layouts import Request, engine_size, propose
from tests.helpers.plan_models import LLAMA_70B, TINY


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"gpus": 0}, "gpus 0: must be above 0"),
        ({"gpus": 12}, "--gpus 12 are no whole machines of --gpus-per-node 8"),
        ({"gpus": 8, "gpu_memory_gib": -1}, "gpu_memory_gib -1"),
    ],
)
def test_impossible_numbers(numbers: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Request(model=TINY, **numbers).check()


def test_why_nothing_fits_is_arithmetic():
    """70.55e9 parameters on one GPU: x 6 bytes = 394 GiB, x 18 = 1183 GiB."""
    request = Request(model=LLAMA_70B, gpus=1)
    assert propose(request) == []
    text = request.why_nothing()[0]
    assert "394.2 GiB on each of 1 GPUs" in text and "1182.7 GiB with it" in text


@pytest.mark.parametrize(("memory", "size"), [(80.0, 8), (1000.0, 1), (600.0, 1), (500.0, 2)])
def test_an_engine_is_as_small_as_its_cache_allows(memory: float, size: int):
    """131 GiB of weights: a quarter of the cards up to half a machine, else 0.6 of a whole machine's."""
    assert engine_size(Request(model=LLAMA_70B, gpus=8, gpu_memory_gib=memory), 8) == size


def test_an_engine_that_cannot_be():
    assert engine_size(Request(model=LLAMA_70B, gpus=1), 1) is None
