"""SGLang's log-probs are those of transformers, at every temperature and layout: what the trainer divides by is what the engine divides by."""

from __future__ import annotations

import pytest
import torch

from tests.contract.engines import hf_logprobs, largest_difference, prompt


def test_weights_loaded_at_start(tp1, tp2, models):
    expected = hf_logprobs(models[1], prompt(1))
    assert (tp1.logprobs_at_start - expected).abs().max() < 1e-4
    assert (tp2.logprobs_at_start - expected).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens(served, models, temperature):
    tokens = prompt(3)
    params = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    answers = served.client.generate([tokens] * 4, params, return_logprob=True)
    for answer in answers:
        reported = torch.tensor([item[0] for item in answer["meta_info"]["output_token_logprobs"]])
        generated = [item[1] for item in answer["meta_info"]["output_token_logprobs"]]
        assert generated == answer["output_ids"] and len(generated) == 24
        by_temperature = hf_logprobs(models[1], tokens + generated, temperature)[-24:]
        assert (reported - by_temperature).abs().max() < 1e-4
        if temperature != 1.0:  # log-probs are those of the scaled distribution, not of the model's own
            assert (reported - hf_logprobs(models[1], tokens + generated)[-24:]).abs().max() > 0.05
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


def test_log_probs_of_a_prompt(served, models):
    assert largest_difference(served.client, models[1]) < 1e-5
