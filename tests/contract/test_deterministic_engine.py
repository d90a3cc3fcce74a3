"""--enable-deterministic-inference on a CPU: an answer is bitwise the same alone, together with others and shuffled."""

# Covers slime_like.sglang_backend.cpu_compat.take_seeds and cpu_invariance in a real server.

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.cpu_compat import BATCH_INVARIANT
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from tests.helpers.tiny_models import make_tiny_model

NUM_PROMPTS, NUM_TOKENS = 32, 16
#: name -> family, tensor parallel size, flags beside --enable-deterministic-inference
ROWS = {
    "tp1": ("qwen3", 1, {}),
    "chunked prefill": ("qwen3", 1, {"chunked_prefill_size": "40"}),
    "tp2": ("qwen3", 2, {}),
    "experts": ("qwen3_moe", 1, {}),
    "experts, tp2": ("qwen3_moe", 2, {"chunked_prefill_size": "40"}),
    "experts, bf16": ("qwen3_moe", 1, {"dtype": "bfloat16"}),
}
Answer = tuple[tuple[int, ...], tuple[float, ...]]


async def answers(
    endpoint: EngineEndpoint, prompts: Sequence[list[int]], order: Sequence[int], at_once: int
) -> dict[int, Answer]:
    """Number of a prompt -> (tokens, log-probs) of its seeded answer."""
    slots, timeout = asyncio.Semaphore(at_once), aiohttp.ClientTimeout(total=150)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def one(number: int) -> tuple[int, Answer]:
            sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
            body = {
                "input_ids": prompts[number], "sampling_params": sampling | {"sampling_seed": 1000 + number},
                "return_logprob": True,
            }  # fmt: skip
            async with slots, session.post(endpoint.url + "/generate", json=body) as response:
                answer = await response.json()
            scores = tuple(item[0] for item in answer["meta_info"]["output_token_logprobs"])
            return number, (tuple(answer["output_ids"]), scores)

        return dict(await asyncio.gather(*map(one, order)))


@pytest.mark.long_run
@pytest.mark.parametrize("row", ROWS)
def test_an_answer_does_not_depend_on_the_others(row, tmp_path):
    family, tp_size, flags = ROWS[row]
    folder = tmp_path / "model"
    make_tiny_model(str(folder), family, vocab_size=128)
    spec = EngineSpec(
        index=0, model_path=str(folder), tp_size=tp_size, dtype="float32", log_path=str(tmp_path / "engine.log"),
        context_length=256, environment={BATCH_INVARIANT: "1"},
        extra_flags={"enable_deterministic_inference": True, "disable_radix_cache": True, "skip_tokenizer_init": True}
        | flags,
    )  # fmt: skip
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 60) for _ in range(draw.randrange(2, 100))] for _ in range(NUM_PROMPTS)]
    together = list(range(NUM_PROMPTS))
    orders = {
        "together": (together, NUM_PROMPTS),
        "shuffled": (draw.sample(together, NUM_PROMPTS), NUM_PROMPTS),
        "eight": (together[::-1], 8),
    }
    engine = launch_engine(spec, timeout_s=120)
    try:
        alone = asyncio.run(answers(engine.endpoint, prompts, together, 1))
        others = {}
        for name, (order, at_once) in orders.items():
            started = time.monotonic()
            others[name] = asyncio.run(answers(engine.endpoint, prompts, order, at_once))
            print(f"{row}, {name}: {NUM_PROMPTS * NUM_TOKENS / (time.monotonic() - started):.0f} tok/s")
    finally:
        engine.close()
    for name, those in others.items():
        differing = [number for number in together if those[number] != alone[number]]
        assert not differing, f"{name}: {len(differing)} of {NUM_PROMPTS} answers differ, first {differing[0]}"
    if "dtype" not in flags:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for number in (0, 17, 31):  # and they are the model's
            tokens, scores = alone[number]
            whole = torch.tensor([[*prompts[number], *tokens]])
            with torch.no_grad():
                logits = model(whole).logits[0, len(prompts[number]) - 1 : -1]
            exact = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scores), exact, rtol=0, atol=2e-5)
