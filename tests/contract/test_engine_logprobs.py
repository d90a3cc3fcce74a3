"""SGLang's log-probs are those of transformers, at every temperature and layout: what the trainer divides by is what
the engine divides by.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract.engines import VOCAB, hf_logprobs, largest_difference, prompt


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


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}])
def test_what_top_p_and_top_k_cut_off_is_not_in_the_log_probs(served, models, cut):
    """SGLang reports the whole distribution's log-prob, the trainer's too, and draws from another one: why
    --rollout-top-p is refused for training.
    """
    tokens = prompt(4)
    answer = served.client.generate(
        tokens, {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **cut}, return_logprob=True
    )
    reported = torch.tensor([item[0] for item in answer["meta_info"]["output_token_logprobs"]])
    whole = [*tokens, *answer["output_ids"]]
    assert (reported - hf_logprobs(models[1], whole)[-16:]).abs().max() < 1e-4
    with torch.no_grad():
        probs = models[1](torch.tensor([whole])).logits[0, -17:-1].softmax(-1).sort(-1, descending=True).values
    kept = torch.arange(VOCAB) < 3 if "top_k" in cut else probs.cumsum(-1) - probs < 0.5
    drawn_from = (probs * kept).sum(-1).log()  # what a log-prob of the distribution that was sampled lacks
    assert (reported >= (probs * kept + ~kept).min(-1).values.log() - 1e-4).all(), "every token is one that was kept"
    assert drawn_from.mean() < -0.2


def test_log_probs_of_a_prompt(served, models):
    assert largest_difference(served.client, models[1]) < 1e-5
