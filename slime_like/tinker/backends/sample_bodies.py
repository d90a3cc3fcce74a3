"""A SampleJob as SGLang's /generate takes it, and its answer as a SampleResult."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import numpy as np

from slime_like.errors import EngineError, RunError
from slime_like.rollout.generate import sample_seed
from slime_like.tinker.records import (
    NO_TOKEN,
    UNLISTED,
    SampledSequence,
    SampleJob,
    SampleResult,
    TopLogprobs,
)

#: What is left out of an engine's list of likely tokens: the wire's empty cell.
_EMPTY_ID, _EMPTY_LOGPROB = 0, -99999.0
#: Log-probs that an engine gives, as text, for prompt_targets: each wanted token's at every position.
_MOST_TARGETS = 2**20
#: SGLang's words for why an answer has ended -> the wire's.
_REASONS = {"stop": "stop", "length": "length"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine can be asked for. takes_seeds: it was started with --enable-deterministic-inference."""

    context_length: int
    vocab_size: int
    takes_seeds: bool


def check_job(job: SampleJob, limits: EngineLimits) -> int:
    """The most tokens of an answer. Raises RunError for what an engine would refuse, or do otherwise than asked."""
    length, left = len(job.prompt), limits.context_length - len(job.prompt)
    if not length:
        raise RunError("the prompt has no tokens.")
    if left < 1:
        raise RunError(f"the prompt has {length} tokens, and the context {limits.context_length}: nothing can follow.")
    low, high = int(job.prompt.min()), int(job.prompt.max())
    if low < 0 or high >= limits.vocab_size:
        raise RunError(
            f"the prompt has the token {low if low < 0 else high}; the model's are 0 to {limits.vocab_size - 1}."
        )
    last = job.prompt_logprobs_last_n
    if last is not None and not 1 <= last < length:
        raise RunError(f"prompt_logprobs_last_n {last}: from 1 to {length - 1}, one less than the prompt has tokens.")
    _check_targets(job, limits)
    if job.num_samples < 1:
        raise RunError(f"num_samples {job.num_samples}: must be at least 1.")
    if job.max_tokens is not None and job.max_tokens < 1:
        raise RunError(f"max_tokens {job.max_tokens}: must be at least 1.")
    if job.temperature < 0 or not 0 < job.top_p <= 1 or (job.top_k < 1 and job.top_k != -1):
        raise RunError(
            f"temperature {job.temperature:g}, top_p {job.top_p:g}, top_k {job.top_k}: a temperature is not negative,"
            " top_p above 0 and at most 1, top_k at least 1, or -1 for all."
        )
    if job.seed is not None and not limits.takes_seeds:
        raise RunError(
            f"seed {job.seed}: this server's engines take none. Fix: leave it out, or start the server with"
            " --sglang-enable-deterministic-inference."
        )
    # Where the client leaves it open, what SGLang (0.5.23) would cut it to: it keeps two places free.
    return min(left, job.max_tokens) if job.max_tokens is not None else max(1, left - 2)


def _check_targets(job: SampleJob, limits: EngineLimits) -> None:
    targets, positions = job.prompt_targets, len(job.prompt) - 1
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != positions:
        raise RunError(
            f"target_prompt_logprobs of shape {list(targets.shape)}: [{positions}, K] is that of all prompt tokens but"
            " the first."
        )
    ids = _wanted(targets)
    if len(ids) and ids[-1] >= limits.vocab_size:
        raise RunError(f"target_prompt_logprobs has the token {ids[-1]}; the model's are 0 to {limits.vocab_size - 1}.")
    if len(ids) * len(job.prompt) > _MOST_TARGETS:
        raise RunError(
            f"target_prompt_logprobs has {len(ids)} different tokens, and the engine scores each at all"
            f" {len(job.prompt)} positions: more than {_MOST_TARGETS} log-probs. Fix: fewer tokens or shorter prompts"
            " a request, or a forward pass, whose targets are scored one by one."
        )


def _wanted(targets: np.ndarray) -> np.ndarray:
    """The tokens that are asked for, ascending."""
    return np.unique(targets[targets >= 0])


def first_scored(job: SampleJob) -> int:
    """The prompt position from which on an engine gives log-probs; of that one itself it gives none."""
    if job.prompt_logprobs_last_n is None or job.prompt_targets is not None:
        return 0
    return len(job.prompt) - job.prompt_logprobs_last_n - 1


def request_body(job: SampleJob, max_tokens: int, adapter: str | None, limits: EngineLimits) -> dict[str, Any]:
    """One request for all samples, each with a seed of its own."""
    count, seed = job.num_samples, secrets.token_hex(8) if job.seed is None else str(job.seed)
    wanted = [] if job.prompt_targets is None else _wanted(job.prompt_targets).tolist()
    scores_prompt = job.prompt_logprobs or job.topk_prompt_logprobs > 0 or bool(wanted)
    # The prompt is scored once, with the first sample.
    starts = [first_scored(job) if scores_prompt and index == 0 else -1 for index in range(count)]
    likeliest = max(job.topk_sample_logprobs, job.topk_prompt_logprobs)
    common: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": job.temperature,
        "top_p": job.top_p,
        "top_k": job.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,  # clients see a stop string, or token, at the end of the answer that it ended
        "spaces_between_special_tokens": False,
    } | _stops(job.stop)
    parameters = [
        common | ({"sampling_seed": sample_seed(seed, 0, index)} if limits.takes_seeds else {})
        for index in range(count)
    ]
    body: dict[str, Any] = {
        "input_ids": [np.ascontiguousarray(job.prompt, dtype=np.int64)] * count,
        "sampling_params": parameters,
        "return_logprob": [True] * count,
        "logprob_start_len": starts,
        "top_logprobs_num": [likeliest if index == 0 else job.topk_sample_logprobs for index in range(count)],
    }
    if wanted:
        # Each sample must have a list that is not empty.
        body["token_ids_logprob"] = [wanted if index == 0 else wanted[:1] for index in range(count)]
    return body | ({"lora_path": [adapter] * count} if adapter else {})


def _stops(stop: tuple[str, ...] | tuple[int, ...] | None) -> dict[str, Any]:
    """What ends an answer before its limit: the model's end tokens, and what a client gives beside them; or nothing."""
    if stop is None:
        return {}
    if not stop:
        return {"ignore_eos": True}
    if isinstance(stop[0], str):
        return {"stop": list(stop)}
    return {"stop_token_ids": [int(token) for token in stop]}


def read_answers(job: SampleJob, answers: Any, weights: str) -> SampleResult:
    """What an engine answered to `request_body`. Raises EngineError for what is not SGLang's, or was cut off."""
    try:
        if len(answers) != job.num_samples:
            raise ValueError(f"{len(answers)} answers to {job.num_samples} samples")
        sequences = tuple(_sequence(answer, job.topk_sample_logprobs) for answer in answers)
        meta = answers[0]["meta_info"]
        return SampleResult(
            sequences=sequences,
            prompt_logprobs=_prompt_logprobs(meta, job) if job.prompt_logprobs else None,
            topk_prompt=_topk_prompt(meta, job) if job.topk_prompt_logprobs else None,
            prompt_targets=_target_logprobs(meta, job.prompt_targets) if job.prompt_targets is not None else None,
            prompt_cache_hit_tokens=int(meta.get("cached_tokens") or 0),
            weights=weights,
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EngineError(
            f"an engine gave an answer that is not SGLang's ({type(error).__name__}: {error}): {str(answers)[:300]}"
        ) from error


def _sequence(answer: dict, topk: int) -> SampledSequence:
    meta, tokens = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"]
    if reason["type"] not in _REASONS:
        raise EngineError(f"an engine ended a request: {reason.get('message') or reason['type']}")
    entries = meta["output_token_logprobs"] if tokens else []
    if [entry[1] for entry in entries] != tokens:
        raise ValueError(f"log-probs of {len(entries)} tokens, not of the answer's {len(tokens)}")
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise ValueError("log-probs that are not finite")
    return SampledSequence(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=logprobs,
        stop_reason=_REASONS[reason["type"]],
        topk=_likeliest(meta["output_top_logprobs"][: len(tokens)], topk) if topk else None,
    )


def _of_prompt(rows: list, job: SampleJob) -> list:
    """[P] of what an engine gives from `first_scored` on; None before, and where no log-prob was asked for."""
    first, length = first_scored(job), len(job.prompt)
    if len(rows) != length - first:
        raise ValueError(f"log-probs of {len(rows)} prompt tokens, not of {length - first}")
    unasked = 0 if job.prompt_logprobs_last_n is None else length - job.prompt_logprobs_last_n
    return [None] * max(first, unasked) + rows[max(0, unasked - first) :]


def _prompt_logprobs(meta: dict, job: SampleJob) -> np.ndarray:
    """[P]: NaN for the first token, which nothing predicts."""
    entries = _of_prompt(meta["input_token_logprobs"], job)
    return np.array([np.nan if entry is None or entry[0] is None else entry[0] for entry in entries], dtype=np.float32)


def _topk_prompt(meta: dict, job: SampleJob) -> TopLogprobs:
    return _likeliest(_of_prompt(meta["input_top_logprobs"], job), job.topk_prompt_logprobs)


def _target_logprobs(meta: dict, targets: np.ndarray) -> np.ndarray:
    """[P - 1, K] of what was asked for, of rows with the log-probs of all wanted tokens at each position."""
    answer = np.where(targets == UNLISTED, np.nan, 0.0).astype(np.float32)
    asked = targets > NO_TOKEN
    if not asked.any():
        return answer
    rows = meta["input_token_ids_logprobs"]
    if len(rows) != len(targets) + 1:
        raise ValueError(f"log-probs of tokens at {len(rows)} positions, not at {len(targets) + 1}")
    for position, row in enumerate(rows[1:]):
        of_token = {entry[1]: entry[0] for entry in row or ()}
        for place in np.flatnonzero(asked[position]):
            answer[position, place] = of_token[int(targets[position, place])]
    return answer


def _likeliest(rows: list, count: int) -> TopLogprobs:
    """rows: of each position [[log-prob, token, text], ...], or nothing."""
    tokens = np.full((len(rows), count), _EMPTY_ID, dtype=np.int32)
    logprobs = np.full((len(rows), count), _EMPTY_LOGPROB, dtype=np.float32)
    for position, row in enumerate(rows):
        for place, entry in enumerate((row or [])[:count]):
            logprobs[position, place], tokens[position, place] = entry[0], entry[1]
    return TopLogprobs(token_ids=tokens, logprobs=logprobs)
