"""Real engines with eight-bit weights that they are sent: their log-probs are those of plain transformers with what was
sent (fp8 weights, whole activations), and of transformers with the same products (int8; fp8 activations), update after
update.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_quantised_checkpoint import FORMATS, make_quantised
from slime_like.config.quantisation import SCHEMES, plain_flags
from slime_like.sglang_backend.cpu_quant import W8A8, W8A16
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import hf_logprobs, options, prompt, prompt_logprobs, sync
from tests.contract.quantised import Sent, dequantised, make_network, quantised_engine, served, with_own_products

#: What starts engines by default is test_quantised_sync.py.
pytestmark = pytest.mark.long_run


def differences(client, network) -> torch.Tensor:
    """Of log-probs, over the tokens of two prompts."""
    return torch.cat(
        [(prompt_logprobs(client, prompt(seed)) - hf_logprobs(network, prompt(seed))).abs() for seed in (1, 2)]
    )


@pytest.mark.parametrize(
    ("name", "activations", "experts", "tp_size"),
    [
        ("int8", W8A8, False, 1),
        ("int8", W8A8, False, 2),
        ("int8", W8A8, True, 1),
        ("int8", W8A8, True, 2),
        ("fp8", W8A16, False, 1),
        ("fp8", W8A16, True, 2),
        ("fp8", W8A8, False, 1),
        ("fp8", W8A8, False, 2),
        ("fp8", W8A8, True, 1),
        ("fp8", W8A8, True, 2),
    ],
)
def test_an_engine_computes_with_what_it_was_sent(name, activations, experts, tp_size, tmp_path):
    scheme = SCHEMES[name]
    start = make_network(1, experts=experts)
    with quantised_engine(start, scheme, tmp_path, tp_size=tp_size, activations=activations) as one:
        publisher = make_publisher(options([one], "ipc"))
        for seed in (1, 2):
            network = make_network(seed, experts=experts)
            sent = Sent.of(network, scheme)
            sync([one], sent, [publisher], "ipc")
            if activations == W8A16:
                expected = dequantised(seed, sent, scheme, experts=experts)
                assert differences(one.client, expected).max() < 1e-5
            else:
                expected = with_own_products(seed, sent, scheme, experts=experts, tp_size=tp_size)
                ours = differences(one.client, expected)
                # A token whose activation lies between two integers may become either; it is then one step off.
                assert ours.median() < 1e-6 and (ours > 1e-4).float().mean() < 0.05 and ours.max() < 1e-2
            # eight bits are not what was trained, and the weights are not those of before
            assert differences(one.client, network).median() > 1e-2
            other = make_network(3 - seed, experts=experts)
            assert (hf_logprobs(other, prompt(1)) - hf_logprobs(network, prompt(1))).abs().max() > 0.1
        publisher.close()


def eight_bit_folder(tmp_path, form):
    """A network, and its folder in one of the public formats."""
    network = make_network(1, experts=False)
    network.save_pretrained(tmp_path / "plain")
    assert make_quantised(tmp_path / "plain", tmp_path / form, form) == 14
    return network, tmp_path / form


@pytest.mark.parametrize(("form", "tp_size"), [("fp8", 2), ("fp8-tensor", 1), ("int8", 1)])
def test_an_engine_serves_a_folder_in_eight_bits(form, tp_size, tmp_path):
    network, folder = eight_bit_folder(tmp_path, form)
    scheme, sent = FORMATS[form][0], Sent(load_file(folder / "model.safetensors"))
    with served(folder, {}, tp_size=tp_size, activations=W8A16) as one:
        if form == "int8":
            expected = with_own_products(1, sent, scheme, experts=False, tp_size=tp_size)
        else:
            whole = {key: scale.reshape(1, 1) if scale.numel() == 1 else scale for key, scale in sent.tensors.items()}
            expected = dequantised(1, Sent(whole), scheme, experts=False)
        assert differences(one.client, expected).max() < 1e-5
        assert differences(one.client, network).median() > 1e-2


def test_an_engine_of_a_folder_in_eight_bits_is_sent_plain_weights(tmp_path):
    network, folder = eight_bit_folder(tmp_path, "int8")
    config = json.loads((folder / "config.json").read_text())
    with served(folder, plain_flags(config, {})) as one:
        publisher = make_publisher(options([one], "ipc"))
        sync([one], network, [publisher], "ipc")
        publisher.close()
        assert differences(one.client, network).max() < 1e-5
