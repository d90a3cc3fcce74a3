"""Supervised training on conversations with a tool, from a Parquet file: the example as it stands."""

from __future__ import annotations

import subprocess

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import ROOT, Finished, assert_nothing_left, environment, our_processes

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

MODEL, DATA = ROOT / "runs/tiny/conversations-model", ROOT / "runs/tiny/conversations/train.parquet"
END = "<|im_end|>"


def mean_loss_of_hf(num_rows: int) -> tuple[float, int]:
    """(mean over the assistant's tokens, their number) of the first rows: each turn alone, behind the prompt that an
    engine would be sent for it.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in pyarrow.parquet.read_table(DATA).slice(0, num_rows).to_pylist():
        messages = [
            {"role": m["role"], "content": m["content"] or ""}
            | ({"reasoning_content": m["reasoning_content"]} if m["reasoning_content"] else {})
            for m in row["messages"]
        ]
        for number in (0, 4):  # the two calls, by hand
            call = {"function": {"name": "calc", "arguments": {"expression": messages[number]["content"]}}}
            messages[number + 1]["tool_calls"] = [call]
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                messages[:place], tools=row["tools"], tokenize=False, add_generation_prompt=True
            )
            thinking = f"<think>{message['reasoning_content']}</think>" if "reasoning_content" in message else ""
            called = f"<calc>{messages[place - 1]['content']}</calc>" if "tool_calls" in message else ""
            ids = [tokenizer.encode(text) for text in (prompt, thinking + message["content"] + called + END)]
            tokens = torch.tensor([*ids[0], *ids[1]])
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            theirs = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
            total -= float(theirs[len(ids[0]) - 1 :].double().sum())
            count += len(ids[1])
    return total / count, count


def test_conversations_of_the_example_are_learned(tmp_path):
    before = our_processes()
    command = ["bash", str(ROOT / "scripts/run_example.sh"), "conversations", "--num-rollout", "60"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    run = Finished(done.returncode, done.stdout, tmp_path / "run")
    assert run.returncode == 0, run.logs()
    assert "640 of 640 conversations are several samples (1280 in all)" in run.logs()
    losses = [line["train/loss"] for line in run.metrics("train")]
    expected, _ = mean_loss_of_hf(32)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.5 < 4 < losses[0]
    assert not list((tmp_path / "run/logs").glob("engine*"))
    assert_nothing_left(before)
