"""The same requests to one real SGLang server: by a bare client, and through our rollout driver and the router, in
turns.

usage: python -m benchmarks.peers.against_sglang [--model FOLDER] [--concurrency 64] [--requests 128]
       [--prompt-words 32] [--new-tokens 64] [--turns 3] [--output FILE.json]

Both send the driver's own bodies (log-probs, seeds), so many at a time, after the engine's cache is flushed; answers
all have the same length; in fp32 on a CPU, in bf16 on a GPU. bare: an aiohttp session to the server itself. ours:
RolloutService, groups of eight, from drawing prompts to the trainer's records. Tokens a second each; the ratio is of
the medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import torch

from benchmarks.peers.work import endless_model, prompt
from benchmarks.step_phases import hardware_name
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import Prompt
from slime_like.rollout.check_data import check_data
from slime_like.rollout.generate import Sampling
from slime_like.rollout.service import EngineAccess, RolloutService
from slime_like.rollout.train_samples import train_samples_of
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import Engine, EngineSpec, launch_engine
from slime_like.sglang_backend.router import Router, launch_router

ROOT = Path(__file__).resolve().parents[2]
GROUP, GOAL, TIMEOUT_S = 8, 0.97, 1800.0
ROUNDING_TOKENS = 64  # of an engine's cache, which it takes in pages


def config_of(folder: str, scratch: Path, options: argparse.Namespace) -> RunConfig:
    """A rollout of all requests."""
    rows = scratch / "rows.jsonl"
    texts = [prompt(number, options.prompt_words) for number in range(options.requests // GROUP)]
    rows.write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts), encoding="utf-8")
    return RunConfig(
        checkpoint=CheckpointConfig(hf_checkpoint=folder),
        data=DataConfig(prompt_data=str(rows), input_key="prompt", label_key="label", num_rollout=1),
        rollout=RolloutConfig(
            rollout_batch_size=options.requests // GROUP, n_samples_per_prompt=GROUP,
            rollout_max_response_len=options.new_tokens, rollout_request_timeout_s=TIMEOUT_S,
        ),
        engine=EngineConfig(sglang_server_concurrency=options.concurrency),
        reward=RewardConfig(rm_type="exact"),
        model=model_from_hf(read_hf_config(folder), ModelConfig()),
    )  # fmt: skip


async def ours(config: RunConfig, router: Router) -> tuple[int, float]:
    """(tokens, seconds) of one rollout through a driver of its own."""
    access = EngineAccess(router_url=router.url, router_api_key=router.api_key, num_engines=1)
    service = RolloutService(config, access, check_data(config))
    try:
        started = time.perf_counter()
        groups = (await service.generate(0)).groups
        records = train_samples_of(config, groups)
        return sum(int(record.loss_mask.sum()) for record in records), time.perf_counter() - started
    finally:
        await service.close()


async def bare(bodies: list[bytes], engine: Engine, concurrency: int) -> tuple[int, float]:
    """(tokens, seconds) of the same bodies, sent to the server itself."""
    headers = {"Content-Type": "application/json"}
    if engine.endpoint.api_key:
        headers["Authorization"] = f"Bearer {engine.endpoint.api_key}"
    tokens, left = 0, iter(bodies)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=headers
    ) as session:

        async def work(own: Iterator[bytes]) -> None:
            nonlocal tokens
            for body in own:  # one iterator for all
                async with session.post(f"{engine.endpoint.url}/generate", data=body) as answer:
                    answer.raise_for_status()
                    tokens += len(orjson.loads(await answer.read())["output_ids"])

        started = time.perf_counter()
        await asyncio.gather(*(work(left) for _ in range(concurrency)))
        return tokens, time.perf_counter() - started


def bodies_of(config: RunConfig, folder: str) -> list[bytes]:
    """The requests that the driver makes of these rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.data.prompt_data and config.model.max_position_embeddings, "config_of sets them"
    texts = [json.loads(line)["prompt"] for line in Path(config.data.prompt_data).read_text("utf-8").splitlines()]
    longest = config.model.max_position_embeddings
    sampling = Sampling.for_training(config.rollout, max_context_tokens=longest, seed=str(config.data.rollout_seed))
    bodies = []
    for index, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        row = Prompt(index=index, text=text, tokens=np.array(ids, dtype=np.int32))
        for number in range(GROUP):
            body = {
                "input_ids": ids,
                "sampling_params": sampling.request(row, number),
                "return_logprob": True,
            }
            bodies.append(orjson.dumps(body))
    return bodies


def measure(folder: str, scratch: Path, options: argparse.Namespace) -> dict:
    """Both in turns on one server, after a warm-up of each."""
    config = config_of(folder, scratch, options)
    bodies = bodies_of(config, folder)
    longest = max(len(orjson.loads(body)["input_ids"]) for body in bodies) + options.new_tokens
    flags = {
        "max_total_tokens": options.concurrency * (longest + ROUNDING_TOKENS),
        "max_running_requests": options.concurrency,
    }
    on_cuda = torch.cuda.is_available()
    spec = EngineSpec(
        index=0, model_path=folder, dtype="bfloat16" if on_cuda else "float32", gpu_ids=("0",) if on_cuda else (),
        log_path=str(scratch / "engine.log"), context_length=longest + 16,
        extra_flags=flags, environment={"OMP_NUM_THREADS": str(options.threads)},
    )  # fmt: skip
    rates: dict[str, list[float]] = {"bare": [], "ours": []}
    engine = launch_engine(spec, TIMEOUT_S)
    router = launch_router(policy="cache_aware", log_path=str(scratch / "router.log"), timeout_s=TIMEOUT_S)
    try:
        router.register(engine.endpoint, timeout_s=TIMEOUT_S)
        client = EngineClient(engine.endpoint, timeout_s=TIMEOUT_S)
        sides = {
            "bare": lambda: bare(bodies, engine, options.concurrency),
            "ours": lambda: ours(config, router),
        }
        short = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, rollout_batch_size=1, rollout_max_response_len=4)
        )
        asyncio.run(ours(short, router))  # warms up
        for turn in range(options.turns):
            for name in sides if turn % 2 == 0 else reversed(sides):
                client.flush_cache(TIMEOUT_S)
                tokens, seconds = asyncio.run(sides[name]())
                if tokens != options.requests * options.new_tokens:
                    raise SystemExit(f"against_sglang: {name} got {tokens} tokens, not those that were asked for")
                rates[name].append(tokens / seconds)
                print(f"{name}: {tokens / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    finally:
        router.close()
        engine.close()
    medians = {name: statistics.median(row) for name, row in rates.items()}
    return {
        "tokens_per_second": medians, "ratio": medians["ours"] / medians["bare"], "goal": GOAL, "turns": rates,
        "prompt_tokens": longest - options.new_tokens,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="HF folder; by default tiny-qwen3, with weights from a seed.")
    for name, default, text in (
        ("concurrency", 64, "Requests at a time, of both."),
        ("requests", 128, "Of a turn; a multiple of 8."),
        ("prompt-words", 32, "Of a prompt."),
        ("new-tokens", 64, "Of an answer."),
        ("turns", 3, "Measurements of each."),
        ("threads", os.cpu_count() or 1, "Of the server."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--output", type=Path, help="Write the result here.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = endless_model(options.model or tiny_model(scratch), scratch / "model")
        result = measure(folder, scratch, options)
    shape = {key: getattr(options, key) for key in ("concurrency", "requests", "prompt_words", "new_tokens", "threads")}
    model = options.model.name if options.model else "tiny-qwen3"
    result = {"model": model, "hardware": hardware_name()} | shape | result
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tiny_model(scratch: Path) -> Path:
    """models/tiny-qwen3 with weights from a seed."""
    command = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), str(scratch / "tiny")]
    subprocess.run(
        [*command, "--model", str(ROOT / "models/tiny-qwen3")], check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return scratch / "tiny"


if __name__ == "__main__":
    main()
