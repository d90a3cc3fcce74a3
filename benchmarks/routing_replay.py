"""How much of the log-prob difference between engine and trainer is the routing: measured with and without
--use-rollout-routing-replay.

usage: routing_replay.py [--samples 16] [--tokens 64] [--experts 32] [--topk 4] [--output benchmarks/results/NAME.json]

A random tiny Qwen3-MoE. The engine's part is HF transformers in fp32: its log-probs and its routers' choices. The
trainer has the same weights in bf16, in fp32, and in fp32 with router weights that are 1 % off (as under another
kernel's rounding, but larger). The bound is the trainer's own difference in the same run without replay: a ratio below
1 is what replay takes away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.megatron_backend.rl_recipe import recipe_of
from slime_like.megatron_backend.worker import TrainWorker
from slime_like.records import TrainSample, per_token
from slime_like.utils.net import free_port

VOCAB, LAYERS = 320, 4


def write_model(folder: str, *, num_experts: int, topk: int, router_noise: float = 0.0) -> None:
    """The same random weights each time, but for the routers' relative noise."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
        num_experts=num_experts, num_experts_per_tok=topk, moe_intermediate_size=48, norm_topk_prob=True,
        decoder_sparse_step=1, tie_word_embeddings=False,
        max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
        for name, parameter in model.named_parameters():
            if router_noise and name.endswith("mlp.gate.weight"):
                parameter.mul_(1 + router_noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


@torch.no_grad()
def engine_samples(folder: str, *, count: int, num_tokens: int, topk: int) -> list[TrainSample]:
    """What an engine would send: sampled tokens, their log-probs, and the experts of every token but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (count, 4), generator=generator)
    for _ in range(num_tokens - 4):
        probs = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
    output = model(tokens, output_router_logits=True)
    logprobs = torch.log_softmax(output.logits[:, :-1], -1).gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
    experts = np.stack(
        [layer.topk(topk, -1).indices.reshape(count, num_tokens, topk).numpy() for layer in output.router_logits],
        axis=2,
    ).astype(np.int16)
    experts[:, -1] = -1
    mask = np.repeat(np.array([0, 1], dtype=np.int8), [4, num_tokens - 4])
    versions = np.where(mask, 0, -1).astype(np.int32)
    return [
        TrainSample(
            prompt_index=i, sample_index=0, tokens=tokens[i].numpy().astype(np.int32), loss_mask=mask,
            weight_versions=versions, reward=0.0,
            advantages=per_token(0.0, mask), weights=per_token(1.0, mask),
            engine_logprobs=np.concatenate([[0.0], logprobs[i]]).astype(np.float32) * mask, routed_experts=experts[i],
        )
        for i in range(count)
    ]  # fmt: skip


def differences(folder: str, samples: list[TrainSample], *, bf16: bool, replay: bool) -> np.ndarray:
    """|trainer's - engine's log-prob| of every trained token: train/logprob_abs_diff is their mean."""
    config = RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model_from_hf(read_hf_config(folder), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=folder),
        data=DataConfig(num_rollout=1),
        rollout=RolloutConfig(rollout_batch_size=len(samples), n_samples_per_prompt=1),
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=1024),
        loss=LossConfig(use_rollout_routing_replay=replay),
        optimizer=OptimizerConfig(bf16=bf16),
    )
    worker = TrainWorker(
        config, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port("127.0.0.1")
    )
    worker.start()
    log_probs = recipe_of(worker).log_probs(samples)
    worker.close()
    return np.concatenate(
        [np.abs(ours - s.engine_logprobs)[s.loss_mask.astype(bool)] for ours, s in zip(log_probs, samples, strict=True)]
    )


def measure(*, count: int, num_tokens: int, num_experts: int, topk: int) -> dict[str, dict[str, float]]:
    """Per trainer: mean and largest difference without and with replay, and the ratio of the means."""
    results = {}
    with tempfile.TemporaryDirectory() as root:
        exact, noisy = f"{root}/exact", f"{root}/noisy"
        write_model(exact, num_experts=num_experts, topk=topk)
        write_model(noisy, num_experts=num_experts, topk=topk, router_noise=0.01)
        samples = engine_samples(exact, count=count, num_tokens=num_tokens, topk=topk)
        for name, folder, bf16 in (
            ("fp32", exact, False),
            ("bf16", exact, True),
            ("fp32, routers 1 % off", noisy, False),
        ):
            own, replayed = (differences(folder, samples, bf16=bf16, replay=replay) for replay in (False, True))
            results[name] = {
                "own_mean": float(own.mean()), "replayed_mean": float(replayed.mean()), "own_max": float(own.max()),
                "replayed_max": float(replayed.max()), "ratio_of_means": float(replayed.mean() / own.mean()),
            }  # fmt: skip
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=16, help="Sequences.")
    parser.add_argument("--tokens", type=int, default=64, help="Tokens of each.")
    parser.add_argument("--experts", type=int, default=32, help="Experts of each layer.")
    parser.add_argument("--topk", type=int, default=4, help="Experts of each token.")
    parser.add_argument("--output", type=Path, help="Write the numbers here as JSON.")
    options = parser.parse_args()
    results = measure(count=options.samples, num_tokens=options.tokens, num_experts=options.experts, topk=options.topk)
    for name, numbers in results.items():
        line = ", ".join(f"{key} {value:.3g}" for key, value in numbers.items())
        print(f"{name:24} {line}")
    if options.output:
        hardware = {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        shown = {key: value for key, value in vars(options).items() if key != "output"}
        options.output.write_text(
            json.dumps({"hardware": hardware, "options": shown, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
