"""A sample as SGLang is asked for it, and its answer."""

import dataclasses

import numpy as np
import pytest

from slime_like.errors import EngineError, RunError
from slime_like.tinker.backends.sample_bodies import EngineLimits, check_job, read_answers, request_body
from slime_like.tinker.records import NO_TOKEN, UNLISTED, SampleJob

LIMITS = EngineLimits(context_length=10, vocab_size=50, takes_seeds=True)
JOB = SampleJob(sampler_id="s", prompt=np.array([3, 4, 5], np.int32), num_samples=2, seed=1)


def body(adapter: str | None = "s@1", limits: EngineLimits = LIMITS, **changes) -> dict:
    job = dataclasses.replace(JOB, **changes)
    return request_body(job, check_job(job, limits), adapter, limits)


def answer(tokens: list[int], *, reason: str = "stop", prompt: list | None = None, **meta) -> dict:
    entries = [[-0.5 - place, token, None] for place, token in enumerate(tokens)]
    known = {"finish_reason": {"type": reason}, "output_token_logprobs": entries, "cached_tokens": 2}
    return {"output_ids": tokens, "meta_info": known | ({"input_token_logprobs": prompt} if prompt else {}) | meta}


def test_each_sample_has_a_seed_of_its_own_which_follows_from_the_jobs():
    seeds = [parameters["sampling_seed"] for parameters in body(num_samples=3)["sampling_params"]]
    assert len(set(seeds)) == 3
    assert seeds[:2] == [parameters["sampling_seed"] for parameters in body(num_samples=2)["sampling_params"]]
    drawn = {body(seed=None)["sampling_params"][0]["sampling_seed"] for _ in range(8)}
    assert len(drawn) == 8
    without = dataclasses.replace(LIMITS, takes_seeds=False)
    assert "sampling_seed" not in body(limits=without, seed=None)["sampling_params"][0]
    with pytest.raises(RunError, match="--sglang-enable-deterministic-inference"):
        body(limits=without)


def test_what_ends_an_answer():
    stops = ("stop", "stop_token_ids", "ignore_eos")

    def parameters(stop) -> dict:
        return {name: value for name, value in body(stop=stop)["sampling_params"][0].items() if name in stops}

    assert parameters(None) == {}
    assert parameters(()) == {"ignore_eos": True}
    assert parameters(("a", "b")) == {"stop": ["a", "b"]}
    assert parameters((7, 8)) == {"stop_token_ids": [7, 8]}


def test_the_prompt_is_scored_once_and_adapters_are_named_for_all():
    plain = body()
    assert plain["logprob_start_len"] == [-1, -1] and plain["lora_path"] == ["s@1", "s@1"]
    assert "lora_path" not in body(adapter=None)
    scored = body(prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=1)
    assert scored["logprob_start_len"] == [0, -1] and scored["top_logprobs_num"] == [3, 1]


def test_the_end_of_a_prompt_is_scored_alone():
    """The engine gives none for the position that it begins at."""
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 1, "prompt_logprobs_last_n": 1}
    assert body(**asked)["logprob_start_len"] == [1, -1]
    assert body(prompt_logprobs=True, prompt_logprobs_last_n=2)["logprob_start_len"] == [0, -1]
    job = dataclasses.replace(JOB, num_samples=1, **asked)
    top = [None, [[-2, 8, None]]]
    result = read_answers(job, [answer([1], prompt=[[None, 4, None], [-0.75, 5, None]], input_top_logprobs=top)], "s")
    assert np.isnan(result.prompt_logprobs[:2]).all() and result.prompt_logprobs[2] == -0.75
    assert result.topk_prompt.token_ids.tolist() == [[0], [0], [8]]
    for wrong in (0, 3):
        with pytest.raises(RunError, match=f"prompt_logprobs_last_n {wrong}: from 1 to 2"):
            body(prompt_logprobs=True, prompt_logprobs_last_n=wrong)
    with pytest.raises(EngineError, match="of 3 prompt tokens, not of 2"):
        read_answers(job, [answer([1], prompt=[[None, 3, None]] * 3, input_top_logprobs=[None] * 3)], "s")


def test_tokens_of_ones_own_are_scored_at_each_position():
    targets = np.array([[7, NO_TOKEN], [9, 7]])
    asked = body(prompt_targets=targets, prompt_logprobs=True, prompt_logprobs_last_n=1)
    assert asked["token_ids_logprob"] == [[7, 9], [7]] and asked["logprob_start_len"] == [0, -1]
    assert "token_ids_logprob" not in body(prompt_targets=np.full((2, 2), NO_TOKEN))
    scores = [None, [[-1.0, 7, None], [-2.0, 9, None]], [[-3.0, 7, None], [-4.0, 9, None]]]
    job = dataclasses.replace(JOB, num_samples=1, prompt_targets=targets)
    result = read_answers(job, [answer([1], input_token_ids_logprobs=scores)], "s")
    assert result.prompt_targets.tolist() == [[-1, 0], [-4, -3]]
    sparse = dataclasses.replace(job, prompt_targets=np.array([[UNLISTED, 9], [NO_TOKEN, UNLISTED]]))
    result = read_answers(sparse, [answer([1], input_token_ids_logprobs=scores)], "s")
    np.testing.assert_array_equal(result.prompt_targets, [[np.nan, -2], [0, np.nan]])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([[1]]), r"of shape \[1, 1\]: \[2, K\]"),
        (np.array([[1], [50]]), "has the token 50; the model's are 0 to 49"),
    ],
)
def test_targets_of_a_prompt_that_make_no_sense_are_refused(targets, message):
    with pytest.raises(RunError, match=message):
        body(prompt_targets=targets)


def test_targets_that_would_take_an_engine_hours_are_refused():
    limits = dataclasses.replace(LIMITS, context_length=4096, vocab_size=2**20)
    job = dataclasses.replace(JOB, prompt=np.zeros(2049, np.int32), prompt_targets=np.arange(2048)[:, None])
    with pytest.raises(RunError, match="2048 different tokens, and the engine scores each at all 2049 positions"):
        check_job(job, limits)
    assert check_job(dataclasses.replace(job, prompt_targets=job.prompt_targets % 100), limits) == 2045


def test_no_more_is_asked_for_than_fits():
    assert check_job(dataclasses.replace(JOB, max_tokens=99), LIMITS) == 7
    assert check_job(dataclasses.replace(JOB, max_tokens=2), LIMITS) == 2
    assert check_job(JOB, LIMITS) == 5


def test_an_answer_as_arrays():
    job = dataclasses.replace(JOB, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1)
    likely = {
        "input_top_logprobs": [None, [[-1, 9, None], [-2, 8, None]], [[-3, 7, None]]],
        "output_top_logprobs": [[[-0.5, 11, None], [-4, 1, None]]],
    }
    prompt = [[None, 3, None], [-0.25, 4, None], [-0.75, 5, None]]
    answers = [answer([11], prompt=prompt, **likely), answer([], reason="length", output_top_logprobs=[])]
    result = read_answers(job, answers, "s@1")
    first, second = result.sequences
    assert (first.tokens.tolist(), first.logprobs.tolist(), first.stop_reason) == ([11], [-0.5], "stop")
    assert (second.tokens.tolist(), second.stop_reason) == ([], "length")
    assert first.topk.token_ids.tolist() == [[11]]
    assert np.isnan(result.prompt_logprobs[0]) and result.prompt_logprobs[1:].tolist() == [-0.25, -0.75]
    assert result.topk_prompt.token_ids.tolist() == [[0, 0], [9, 8], [7, 0]]
    assert result.topk_prompt.logprobs[2].tolist() == [-3, -99999]
    assert (result.prompt_cache_hit_tokens, result.weights) == (2, "s@1")


@pytest.mark.parametrize(
    "answers",
    [
        [answer([1])],  # one is missing
        [answer([1]), {}],
        [answer([1]), answer([2], reason="abort")],
        [answer([1]), answer([2], output_token_logprobs=[[-1, 3, None]])],
        [answer([1]), answer([2], output_token_logprobs=[[float("nan"), 2, None]])],
    ],
)
def test_what_is_no_answer_is_told(answers):
    with pytest.raises(EngineError):
        read_answers(JOB, answers, "base")
