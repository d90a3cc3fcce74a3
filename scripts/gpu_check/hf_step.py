"""One train step, and one engine, against HF transformers on the CPU in fp32: code that shares nothing with ours."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from answers import Answer, at_least, at_most
from ladder import Check

from tests.helpers.hf_truth import Truth, first_step_truth, load_model, score
from tests.helpers.train_world import free_ports, make_config, make_samples, recipe_of

#: precision -> (log-probs, mean difference; loss, absolute; gradient norm, relative)
TOLERANCES = {"fp32": (2e-4, 1e-4, 2e-3), "bf16": (3e-2, 2e-2, 8e-2)}
#: Prompts and tokens of an engine's answers.
PROMPT_TOKENS, ANSWER_TOKENS, MANY = 16, 48, 64
#: log-prob of a sampled token, engine against HF: fp32, and bf16 against fp32.
ENGINE_TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2}
START_S = 600.0


def compare(model: Path, on_cuda: bool) -> Answer:
    """Our trainer's first step on a model folder against HF's, in fp32, and in bf16 where there is a GPU."""
    samples = make_samples(8)
    truth = first_step_truth(str(model), samples, reference=str(model), temperature=1.0, kl_coef=0.0, entropy_coef=0.0)
    numbers: dict = {}
    checks: list[Check] = []
    for precision in ("fp32", "bf16") if on_cuda else ("fp32",):
        checks += _checks(precision, truth, _our_step(model, samples, bf16=precision == "bf16"), numbers)
    where = "cuda" if on_cuda else "the CPU"
    if not on_cuda:
        checks, where = checks + _pretended(model, truth, numbers), "the CPU and a pretended device"
    worst = max(check.value / check.limit for check in checks)
    return Answer(f"equal to HF; the furthest number used {worst:.0%} of its tolerance", where, numbers, checks)


def _our_step(model: Path, samples, *, bf16: bool) -> tuple[dict[str, float], list[np.ndarray]]:
    """(metrics of one step, log-probs before it)"""
    from slime_like.megatron_backend.worker import TrainWorker

    worker = TrainWorker(
        make_config(str(model), optimizer={"bf16": bf16}),
        rank=0,
        world_size=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=free_ports(1)[0],
    )
    worker.start()
    try:
        recipe = recipe_of(worker)
        log_probs = recipe.log_probs(samples)
        return recipe.train(0, samples).metrics, log_probs
    finally:
        worker.close()


def _checks(
    precision: str, truth: Truth, ours: tuple[dict[str, float], list[np.ndarray]], numbers: dict
) -> list[Check]:
    metrics, log_probs = ours
    mean, loss, norm = TOLERANCES[precision]
    difference = np.abs(np.concatenate(log_probs) - np.concatenate(truth.log_probs))
    numbers |= {f"{precision} loss (HF {truth.loss:.6g})": metrics["train/loss"]}
    numbers |= {f"{precision} gradient norm (HF {truth.grad_norm:.6g})": metrics["train/grad_norm"]}
    numbers |= {f"{precision} log-probs, largest difference": float(difference.max())}
    return [
        at_most(f"{precision} log-probs, mean difference", float(difference.mean()), mean),
        at_most(f"{precision} loss, difference", abs(metrics["train/loss"] - truth.loss), loss),
        at_most(f"{precision} gradient norm, relative", abs(metrics["train/grad_norm"] / truth.grad_norm - 1.0), norm),
    ]


def _pretended(model: Path, truth: Truth, numbers: dict) -> list[Check]:
    """The same step through the trainer's CUDA branches, on a pretended device; nothing where that cannot be."""
    from tests.pretend_gpu.processes import Pretender, why_not
    from tests.pretend_gpu.training import train_steps

    reason = why_not()
    if reason is not None:
        numbers["pretended device"] = f"not tried: {reason}"
        return []
    pretend = Pretender()
    try:
        (answer,) = pretend(train_steps, 1, str(model), 1, {}, timeout_s=START_S)
    finally:
        pretend.close()
    numbers["pretended device: waits of the host in one rollout"] = sum(answer["reads"].values())
    metrics = answer["metrics"][0]
    _, loss, norm = TOLERANCES["fp32"]
    return [
        at_most("pretended loss, difference", abs(metrics["train/loss"] - truth.loss), loss),
        at_most("pretended gradient norm, relative", abs(metrics["train/grad_norm"] / truth.grad_norm - 1.0), norm),
    ]


def compare_engine(model: Path, on_cuda: bool, log_path: Path) -> Answer:
    """A real engine of a model folder: its sampled tokens' log-probs against HF's, and its speed."""
    from slime_like.sglang_backend.client import EngineClient
    from slime_like.sglang_backend.launcher import EngineSpec, launch_engine

    precision = "bf16" if on_cuda else "fp32"
    spec = EngineSpec(
        index=0, model_path=str(model), dtype="bfloat16" if on_cuda else "float32", log_path=str(log_path),
        gpu_ids=("0",) if on_cuda else (), extra_flags={} if on_cuda else {"max_total_tokens": 16384},
    )  # fmt: skip
    started = time.monotonic()
    engine = launch_engine(spec, START_S)
    try:
        start_s = time.monotonic() - started
        client = EngineClient(engine.endpoint, timeout_s=START_S)
        prompt = np.random.default_rng(0).integers(0, 200, PROMPT_TOKENS).tolist()
        one, seconds_of_one = _generate(client, [prompt])
        many, seconds_of_many = _generate(client, [prompt] * MANY)
    finally:
        engine.close()
    difference = float(np.mean([_difference(model, prompt, answer) for answer in one]))
    tokens = sum(len(answer["meta_info"]["output_token_logprobs"]) for answer in many)
    numbers = {"seconds to start": start_s, "tokens/s alone": ANSWER_TOKENS / seconds_of_one}
    numbers |= {f"tokens/s with {MANY} at once": tokens / seconds_of_many}
    checks = [
        at_most(
            f"{precision} log-probs of sampled tokens, mean difference to HF", difference, ENGINE_TOLERANCE[precision]
        ),
        at_least("tokens of many answers", tokens, MANY * ANSWER_TOKENS),
    ]
    where = "cuda" if on_cuda else "the CPU"
    return Answer(f"up after {start_s:.0f} s, {tokens / seconds_of_many:.0f} tokens/s", where, numbers, checks)


def _generate(client, prompts: list[list[int]]) -> tuple[list[dict], float]:
    sampling = {"temperature": 1.0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    started = time.monotonic()
    answers = client.generate(prompts, sampling, return_logprob=True)
    return answers, time.monotonic() - started


def _difference(model: Path, prompt: list[int], answer: dict) -> float:
    """Mean |log-prob difference| of an answer's tokens between the engine and HF."""
    import torch

    items = answer["meta_info"]["output_token_logprobs"]
    tokens = np.array(prompt + [item[1] for item in items])
    with torch.no_grad():
        log_probs, _ = score(load_model(str(model)), tokens, 1.0)
    ours = np.array([item[0] for item in items])
    return float(np.abs(log_probs.numpy()[len(prompt) - 1 :] - ours).mean())
