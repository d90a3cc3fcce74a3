"""Real engines with eight-bit weights that they are sent: their log-probs are those of plain transformers with what was
sent (fp8 weights, whole activations), and of transformers with the same products (int8; fp8 activations), update after
update.
"""

from __future__ import annotations

import pytest

from slime_like.config.quantisation import SCHEMES
from slime_like.sglang_backend.cpu_quant import W8A8, W8A16
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import hf_logprobs, largest_difference, options, prompt, sync
from tests.contract.quantised import Sent, dequantised, make_network, quantised_engine, with_own_products

LONG = pytest.mark.long_run


@pytest.mark.parametrize(
    ("name", "activations", "experts", "tp_size"),
    [
        ("int8", W8A8, False, 1),
        pytest.param("int8", W8A8, False, 2, marks=LONG),
        pytest.param("int8", W8A8, True, 1, marks=LONG),
        pytest.param("int8", W8A8, True, 2, marks=LONG),
        pytest.param("fp8", W8A16, False, 1, marks=LONG),
        pytest.param("fp8", W8A16, True, 2, marks=LONG),
        pytest.param("fp8", W8A8, False, 1, marks=LONG),
        pytest.param("fp8", W8A8, False, 2, marks=LONG),
        pytest.param("fp8", W8A8, True, 1, marks=LONG),
        pytest.param("fp8", W8A8, True, 2, marks=LONG),
    ],
)
def test_an_engine_computes_with_what_it_was_sent(name, activations, experts, tp_size, tmp_path):
    scheme = SCHEMES[name]
    with quantised_engine(
        make_network(1, experts=experts), scheme, tmp_path, tp_size=tp_size, activations=activations
    ) as one:
        publisher = make_publisher(options([one], "ipc"))
        for seed in (1, 2):
            network = make_network(seed, experts=experts)
            sent = Sent.of(network, scheme)
            sync([one], sent, [publisher], "ipc")
            if activations == W8A16:
                expected, bound = dequantised(seed, sent, scheme, experts=experts), 1e-5
            else:
                expected, bound = (
                    with_own_products(seed, sent, scheme, experts=experts, tp_size=tp_size),
                    1e-4,
                )
            assert largest_difference(one.client, expected) < bound
            # eight bits are not what was trained, and the weights are not those of before
            assert largest_difference(one.client, network) > 100 * bound
            other = make_network(3 - seed, experts=experts)
            assert (hf_logprobs(other, prompt(1)) - hf_logprobs(network, prompt(1))).abs().max() > 0.1
        publisher.close()
