"""GRPO on "sort four digits" by a client of the Tinker server: python rl.py URL MODEL train.jsonl [STEPS] [RANK]."""

import json
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

url, model, path = sys.argv[1:4]
steps, rank = int((sys.argv[4:5] or ["40"])[0]), int((sys.argv[5:6] or ["32"])[0])
service = tinker.ServiceClient(base_url=url)
training = service.create_lora_training_client(base_model=model, rank=rank, seed=0)
tokenizer = training.get_tokenizer()
rows = [json.loads(line) for line in open(path)]
how = types.SamplingParams(max_tokens=6, temperature=1.0)

for step in range(steps):
    sampler = training.save_weights_and_get_sampling_client()
    batch = [rows[(32 * step + i) % len(rows)] for i in range(32)]
    chats = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in batch]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), 8, how) for prompt in prompts]
    data, all_rewards = [], []
    for row, prompt, answer in zip(batch, prompts, asked, strict=True):
        samples = answer.result().sequences
        texts = [tokenizer.decode(sample.tokens, skip_special_tokens=True).strip() for sample in samples]
        rewards = [float(s.stop_reason == "stop" and t == row["label"]) for s, t in zip(samples, texts, strict=True)]
        all_rewards += rewards
        advantages = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        for sample, advantage in zip(samples, advantages, strict=True):
            tokens, before = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
            inputs: dict[str, Any] = {
                "target_tokens": tokens[1:],
                "logprobs": [*before, *(sample.logprobs or [])],
                "advantages": [*before, *([float(advantage)] * len(sample.tokens))],
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for half in (data[:128], data[128:]):
        loss = training.forward_backward(half, "ppo")
        training.optim_step(types.AdamParams(learning_rate=2e-3, beta2=0.98, eps=1e-8, grad_clip_norm=1.0))
    metrics = loss.result().metrics
    print(f"step {step:3d}  reward {np.mean(all_rewards):.3f}  loss {metrics['loss:sum']:.3f}", flush=True)
