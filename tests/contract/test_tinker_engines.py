"""Clients' adapters on real engines: what is sampled is of the sampler's weights, whatever came and went meanwhile."""

# Covers slime_like.tinker.backends.seat too.

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from slime_like.errors import RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.launcher import Engine, EngineSpec, launch_engine
from slime_like.tinker.backends.engines import EngineSampling, SamplingOptions
from slime_like.tinker.backends.sample_bodies import EngineLimits
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import NO_TOKEN, SampleJob
from tests.contract.engines import hf_logprobs, make_model, prompt

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = {"four": 4, "eight": 8, "two": 2, "sixteen": 16}
LIMITS = EngineLimits(context_length=1024, vocab_size=320, takes_seeds=True)
FLAGS = {
    "enable_lora": True, "max_lora_rank": "16", "lora_target_modules": TARGETS, "max_loras_per_batch": "3",
    "max_loaded_loras": "3", "enable_deterministic_inference": True,
}  # fmt: skip


class Launched:
    """A fleet of one engine, started here."""

    def __init__(self, folder: Path, logs: Path):
        self._folder, self._logs, self._starts = folder, logs, 0
        self.engine: Engine = self._launch()

    def _launch(self) -> Engine:
        self._starts += 1
        spec = EngineSpec(
            index=0, model_path=str(self._folder), dtype="float32", context_length=1024, extra_flags=FLAGS,
            log_path=str(self._logs / f"engine-{self._starts}.log"),
        )  # fmt: skip
        return launch_engine(spec, 120)

    @property
    def endpoints(self) -> list[EngineEndpoint]:
        return [self.engine.endpoint]

    def revive(self) -> list[str]:
        deadline = time.monotonic() + 10
        while (status := self.engine.poll()) is None and time.monotonic() < deadline:  # as EngineFleet gives it time
            time.sleep(0.1)
        if status is None:
            return []
        self.engine.close()
        self.engine = self._launch()
        return [f"status {status}"]

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory) -> Iterator[Launched]:
    launched = Launched(model_folder, tmp_path_factory.mktemp("tinker-engine"))
    yield launched
    launched.close()


@pytest.fixture(scope="module")
def samplers(tmp_path_factory) -> dict[str, tuple[str | None, torch.nn.Module]]:
    """Name -> (folder, the same weights as one HF model): adapters by peft, the base, and a whole other model."""
    samplers: dict[str, tuple[str | None, torch.nn.Module]] = {"base": (None, make_model(1))}
    for seed, (name, rank) in enumerate(RANKS.items(), 10):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False)
        model = peft.get_peft_model(make_model(1), config)
        folder = tmp_path_factory.mktemp("samplers") / name
        model.save_pretrained(folder)
        samplers[name] = (str(folder), model.merge_and_unload().eval())
    other = tmp_path_factory.mktemp("samplers") / "whole"
    make_model(2).save_pretrained(other)
    samplers["whole"] = (str(other), make_model(2))
    return samplers


def job(sampler: str, seed: int | None = 1, **options) -> SampleJob:
    return SampleJob(
        sampler_id=sampler, prompt=np.array(prompt(5, 20), np.int32), seed=seed,
        **{"num_samples": 2, "max_tokens": 12, **options},
    )  # fmt: skip


def run(fleet: Launched, samplers: dict, body, *, max_adapters: int = 2):
    """What `body(backend)` gives, with every sampler open. The engine goes on."""

    async def within():
        options = SamplingOptions(
            base_folder=str(fleet._folder), limits=LIMITS, max_adapters=max_adapters, max_rank=16, load_deadline_s=60
        )
        backend = EngineSampling(fleet, options)
        try:
            for name, (folder, _) in samplers.items():
                await backend.open(name, folder)
            return await body(backend)
        finally:
            for name in samplers:
                await backend.release(name)
            await asyncio.gather(*backend._releasing)
            await backend._session.close()

    return asyncio.run(asyncio.wait_for(within(), 240))


def worst(model: torch.nn.Module, result, tokens: list[int]) -> float:
    """Largest difference between a result's log-probs and the model's."""
    differences = [0.0]
    for sequence in result.sequences:
        whole = hf_logprobs(model, tokens + sequence.tokens.tolist())
        differences.append(np.abs(whole[len(tokens) - 1 :].numpy() - sequence.logprobs).max())
    return max(differences)


def test_samples_are_of_the_samplers_weights_and_those_pushed_out_come_back(fleet, samplers):
    """Four adapters, the base, and a whole other model at once, on an engine with room for two adapters."""
    names = [*samplers, *reversed(samplers)]

    async def body(backend):
        return await asyncio.gather(*(backend.sample(job(name)) for name in names))

    results = run(fleet, samplers, body)
    for name, result in zip(names, results, strict=True):
        assert len(result.sequences) == 2
        assert worst(samplers[name][1], result, prompt(5, 20)) <= 1e-4, name
    first, second = results[: len(samplers)], list(reversed(results[len(samplers) :]))
    for one, other in zip(first, second, strict=True):  # the same seed
        assert [s.tokens.tolist() for s in one.sequences] == [s.tokens.tolist() for s in other.sequences]
        assert one.sequences[0].tokens.tolist() != one.sequences[1].tokens.tolist()


def test_what_a_job_asks_for(fleet, samplers):
    async def body(backend):
        scored = backend.sample(
            job("eight", prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, temperature=0.0)
        )
        return await asyncio.gather(
            scored,
            backend.sample(job("eight", seed=7)),
            backend.sample(job("eight", seed=None)),
            backend.sample(job("eight", seed=None)),
            backend.sample(job("eight", stop=tuple(range(3, 320)))),
            backend.sample(job("eight", stop=(), max_tokens=200, num_samples=8)),
            backend.sample(job("eight", max_tokens=None, num_samples=1, stop=())),
        )

    scored, seven, one, two, stopped, endless, longest = run(fleet, samplers, body)
    model, tokens = samplers["eight"][1], prompt(5, 20)
    with torch.no_grad():
        rows = model(torch.tensor([tokens + scored.sequences[0].tokens.tolist()])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(scored.prompt_logprobs[1:], hf_logprobs(model, tokens), atol=1e-4)
    assert np.isnan(scored.prompt_logprobs[0])
    assert scored.topk_prompt.logprobs.shape == (20, 3) and scored.topk_prompt.logprobs[0].tolist() == [-99999.0] * 3
    np.testing.assert_allclose(scored.topk_prompt.logprobs[1:], rows[:19].topk(3).values, atol=1e-4)
    assert scored.topk_prompt.token_ids[1:].tolist() == rows[:19].topk(3).indices.tolist()
    for sequence in scored.sequences:
        count = len(sequence.tokens)
        np.testing.assert_allclose(sequence.topk.logprobs, rows[19 : 19 + count].topk(2).values, atol=1e-4)
        assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens.tolist()  # temperature 0
    answers = [[s.tokens.tolist() for s in result.sequences] for result in (seven, one, two)]
    assert answers[0] != answers[1] != answers[2]
    assert [(s.stop_reason, len(s.tokens)) for s in stopped.sequences] == [("stop", 1)] * 2
    assert [(s.stop_reason, len(s.tokens)) for s in endless.sequences] == [("length", 200)] * 8
    assert [len(s.tokens) for s in longest.sequences] == [1024 - 20 - 2]


def test_prompts_are_scored_at_their_end_and_on_tokens_of_ones_own(fleet, samplers):
    model, tokens = samplers["eight"][1], prompt(5, 20)
    targets = np.random.default_rng(0).integers(3, 320, (19, 3))
    targets[4, 1] = NO_TOKEN
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "prompt_logprobs_last_n": 6}

    async def body(backend):
        jobs = (job("eight", **asked), job("eight", **asked, prompt_targets=targets), job("eight", **asked))
        return await asyncio.gather(*map(backend.sample, jobs))

    results = run(fleet, samplers, body)
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for result in results:
        assert np.isnan(result.prompt_logprobs[:14]).all()
        np.testing.assert_allclose(result.prompt_logprobs[14:], hf_logprobs(model, tokens)[13:], atol=1e-4)
        assert result.topk_prompt.token_ids[14:].tolist() == rows[13:19].topk(3).indices.tolist()
        assert (result.topk_prompt.logprobs[:14] == -99999).all()
    expected = np.where(targets >= 0, np.take_along_axis(rows[:19].numpy(), targets, 1), 0.0)
    np.testing.assert_allclose(results[1].prompt_targets, expected, atol=1e-4)


def test_a_clients_mistakes_are_told_and_cost_nobody_else_anything(fleet, samplers, tmp_path):
    mistakes = [
        ({"prompt": np.array([], np.int32)}, "no tokens"), ({"prompt": np.array([320])}, "the token 320"),
        ({"prompt": np.ones(1024, np.int32)}, "nothing can follow"), ({"sampler_id": "nobody"}, "not open"),
        ({"max_tokens": 0}, "max_tokens 0"), ({"temperature": -1.0}, "temperature -1"), ({"top_k": 0}, "top_k 0"),
    ]  # fmt: skip
    torch.manual_seed(3)
    config = peft.LoraConfig(r=32, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(make_model(1), config).save_pretrained(tmp_path / "large")

    async def body(backend):
        for changes, message in mistakes:
            asked = {"sampler_id": "four", "prompt": np.array([5, 6], np.int32), **changes}
            with pytest.raises(RunError, match=message):
                await backend.sample(SampleJob(**asked))
        with pytest.raises(RunError, match="rank 32 is above --max-lora-rank 16"):
            await backend.open("large", str(tmp_path / "large"))
        with pytest.raises(RunError, match="neither"):
            await backend.open("nothing", str(tmp_path))
        with pytest.raises(RunError, match="already"):
            await backend.open("four", samplers["eight"][0])
        return await backend.sample(job("four"))

    assert worst(samplers["four"][1], run(fleet, samplers, body), prompt(5, 20)) <= 1e-4


def test_an_engine_that_dies_is_started_anew_with_its_adapters(fleet, samplers):
    async def body(backend):
        before = await backend.sample(job("four"))
        running = [asyncio.create_task(backend.sample(job(n, max_tokens=900, stop=()))) for n in ("four", "eight")]
        await asyncio.sleep(0.3)
        os.killpg(fleet.engine.pid, signal.SIGKILL)
        lost = await asyncio.gather(*running, return_exceptions=True)
        return before, lost, await backend.sample(job("four")), await backend.sample(job("eight"))

    before, lost, four, eight = run(fleet, samplers, body)
    assert [type(error) for error in lost] == [BackendLost, BackendLost], lost
    assert [s.tokens.tolist() for s in four.sequences] == [s.tokens.tolist() for s in before.sequences]
    assert worst(samplers["eight"][1], eight, prompt(5, 20)) <= 1e-4
