"""What the client library can ask of a prompt, against the app over HTTP."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.helpers.tinker_app import Served, serve
from tests.helpers.tinker_bigrams import BASE, base_table, log_softmax

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, serve(tmp_path_factory.mktemp("tinker")) as running:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running


@pytest.fixture(scope="module")
def client(served: Served):
    with tinker.ServiceClient(base_url=served.url, api_key="tml-local") as of_all:
        yield of_all


def test_prompts_are_scored_at_their_end_and_on_tokens_of_ones_own(client):
    sampler = client.create_sampling_client(base_model=BASE)
    ours, prompt = log_softmax(base_table()), [1, 2, 3, 4, 5]
    wanted = torch.full((4, 6), -1)
    wanted[1, 0], wanted[1, 3], wanted[3, 2] = 7, 0, 9
    expected = torch.zeros(4, 6)
    for place in (wanted >= 0).nonzero().tolist():
        expected[tuple(place)] = ours[prompt[place[0]], wanted[tuple(place)]]
    sparse = types.TensorData.from_torch_sparse(wanted, pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    for targets in (types.TensorData.from_torch(wanted), sparse):
        answer = sampler.sample(
            types.ModelInput.from_ints(prompt),
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            prompt_logprobs_last_n=2,
            target_prompt_logprobs=targets,
        ).result()
        assert answer.prompt_logprobs[:3] == [None] * 3
        assert answer.prompt_logprobs[3:] == pytest.approx(ours[[3, 4], [4, 5]].tolist(), abs=1e-6)
        assert answer.topk_prompt_logprobs[:3] == [None] * 3
        assert [pairs[0][0] for pairs in answer.topk_prompt_logprobs[3:]] == ours[[3, 4]].argmax(-1).tolist()
        theirs = answer.target_prompt_logprobs
        assert (theirs.sparse_crow_indices, theirs.sparse_col_indices) == (
            targets.sparse_crow_indices,
            targets.sparse_col_indices,
        )
        torch.testing.assert_close(theirs.to_torch().to_dense(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prompt_alt_tokens_k": 2}, "not at each of its positions. Fix: topk_prompt_logprobs"),
        ({"target_prompt_logprobs": types.TensorData.from_numpy(np.array([[-2], [1]]))}, "or -1 for none"),
    ],
)
def test_what_engines_cannot_score_is_refused_with_the_reason(client, asked, reason):
    sampler = client.create_sampling_client(base_model=BASE)
    params = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.BadRequestError, match=reason):
        sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params, **asked).result()


def test_the_base_model_is_sampled_too(client):
    sampler = client.create_sampling_client(base_model=BASE)
    params = types.SamplingParams(max_tokens=1, temperature=0)
    answer = sampler.sample(types.ModelInput.from_ints([4]), num_samples=1, sampling_params=params).result()
    assert answer.sequences[0].tokens == [int(base_table()[4].argmax())]
