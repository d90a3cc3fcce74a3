"""The Tinker server on the real stack: the public SDK, unmodified, trains, saves and samples, and a loop of PEFT's on
the HF model gives the same numbers.
"""

# Covers slime_like.tinker.assemble, slime_like.tinker.server and slime_like.tinker.backends.start.

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import peft
import psutil
import pytest
import torch

from slime_like.utils.net import free_port
from tests.e2e.runs import assert_nothing_left, our_processes
from tests.e2e.tinker_server import (
    COOKBOOK,
    SHARED,
    install_sdk,
    running_server,
    start_client,
    start_server,
    stop_server,
)
from tests.helpers.hf_truth import load_model

pytestmark = pytest.mark.e2e

STEPS, LEARNING_RATE = 8, 4e-3
PROMPT = [21, 34, 55, 89]


@pytest.fixture(scope="session")
def sdk(tmp_path_factory) -> Path:
    return install_sdk(tmp_path_factory.mktemp("sdk"))


def plan(base: Path, *, rank: int = 4, seed: int = 1, rows_seed: int = 0, **changes) -> dict:
    """What a client does: see tinker_client.py."""
    source = np.random.default_rng(rows_seed)
    rows = [source.integers(5, 290, size).tolist() for size in (9, 14, 6, 11)]
    sample = {"prompt": PROMPT, "num_samples": 3, "max_tokens": 8, "seed": 5}
    return {
        "base": str(base), "rank": rank, "seed": seed, "rows": rows, "steps": STEPS, "learning_rate": LEARNING_RATE,
        "sample": sample,
    } | changes  # fmt: skip


def only(lines: list[dict], what: str) -> dict:
    (line,) = [line for line in lines if line["what"] == what]
    return line


def steps_of(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["what"] == "step"]


def folder_of(server, path: str) -> str:
    """Where a tinker://… lies on the server's disk: checkpoints are PEFT folders."""
    model, side, name = path.removeprefix("tinker://").split("/")
    (folder,) = (server.state / "weights" / quote(model, safe="=@") / side).glob(f"{name}-*")
    return str(folder)


def load_weights(base: Path, folder: str, *, is_trainable: bool = False) -> torch.nn.Module:
    """A folder of PEFT's over the base, or a whole model, in float64."""
    if not Path(folder, "adapter_config.json").exists():
        return load_model(folder).double()
    return peft.PeftModel.from_pretrained(load_model(str(base)), folder, is_trainable=is_trainable).double()


def plain_losses(base: Path, folder: str, job: dict) -> list[float]:
    """Of a plain loop in float64: HF's model, with PEFT's adapters, from the folder; torch's AdamW."""
    model = load_weights(base, folder, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=job["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for _ in range(job["steps"]):
        loss = sum(-log_probs(model, row).sum() for row in job["rows"])
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return losses


def log_probs(model, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    logs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logs.gather(-1, ids[0, 1:, None]).squeeze(-1)


def check_client(server, base: Path, job: dict, lines: list[dict]) -> None:
    """Losses are PEFT's, samples are of the merged weights, and a client that loads the state is where this one was."""
    losses = [line["loss"] for line in steps_of(lines)]
    expected = plain_losses(base, folder_of(server, only(lines, "start")["path"]), job)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < 0.95 * losses[0]
    sampled = only(lines, "sample")
    merged = load_weights(base, folder_of(server, sampled["path"]))
    with torch.no_grad():
        for tokens, given in sampled["sequences"]:
            assert len(tokens) == job["sample"]["max_tokens"]
            whole = log_probs(merged, PROMPT + tokens)
            np.testing.assert_allclose(given, whole[len(PROMPT) - 1 :], atol=1e-4)
            np.testing.assert_allclose(sampled["prompt_logprobs"][1:], whole[: len(PROMPT) - 1], atol=1e-4)
        plain = log_probs(load_model(str(base)).double(), PROMPT)
        np.testing.assert_allclose(only(lines, "base")["logprobs"][1:], plain, atol=1e-4)
    assert np.abs(np.array(sampled["prompt_logprobs"][1:]) - plain.numpy()).max() > 1e-2
    loaded = only(lines, "loaded")
    assert loaded["ours"] == loaded["theirs"] < losses[-1]


def test_the_sdk_trains_saves_and_samples(tiny_model_dir, sdk, tmp_path):
    before = our_processes()
    with running_server(tiny_model_dir, tmp_path / "state", *SHARED) as server:
        job = plan(tiny_model_dir)
        lines = start_client(tmp_path / "out", sdk, "tinker_client.py", server.url, json.dumps(job)).wait(90, server)
        check_client(server, tiny_model_dir, job, lines)
    assert_nothing_left(before)


@pytest.mark.long_run
@pytest.mark.timeout(600)
def test_two_tenants_at_once_learn_what_each_learns_alone(tiny_model_dir, python_with, tmp_path):
    """Different ranks, rows and seeds: numbers bitwise equal to those of a server for oneself."""
    python = python_with("tinker==0.38.0")
    jobs = {"ann": plan(tiny_model_dir, rank=4), "bob": plan(tiny_model_dir, rank=16, seed=2, rows_seed=7)}
    before = our_processes()

    def results(server, names: list[str]) -> dict[str, list[dict]]:
        clients = {
            name: start_client(tmp_path / f"{name}-{len(names)}", python, "tinker_client.py", server.url,
                               json.dumps(jobs[name]))
            for name in names
        }  # fmt: skip
        return {name: client.wait(120, server) for name, client in clients.items()}

    with running_server(tiny_model_dir, tmp_path / "both", *SHARED) as server:
        together = results(server, ["ann", "bob"])
        for name, job in jobs.items():
            check_client(server, tiny_model_dir, job, together[name])
    with running_server(tiny_model_dir, tmp_path / "alone", *SHARED) as server:
        for name in jobs:
            alone = results(server, [name])[name]
            assert steps_of(alone) == steps_of(together[name])
            assert only(alone, "sample")["sequences"] == only(together[name], "sample")["sequences"]
    assert_nothing_left(before)


@pytest.mark.long_run
@pytest.mark.timeout(400)
def test_who_trains_all_parameters_and_who_an_adapter_share_a_server(tiny_model_dir, python_with, tmp_path):
    python = python_with("tinker==0.38.0")
    jobs = {"whole": plan(tiny_model_dir, rank=0, learning_rate=1e-3), "adapter": plan(tiny_model_dir, rows_seed=3)}
    with running_server(tiny_model_dir, tmp_path / "state", *SHARED) as server:
        clients = {
            name: start_client(tmp_path / name, python, "tinker_client.py", server.url, json.dumps(job))
            for name, job in jobs.items()
        }
        for name, job in jobs.items():
            check_client(server, tiny_model_dir, job, clients[name].wait(150, server))


@pytest.mark.long_run
@pytest.mark.timeout(600)
def test_the_cookbooks_loops_run_offline(tiny_model_dir, tmp_path):
    """tinker-cookbook's supervised loop lowers its loss, and its RL loop raises the reward."""
    sdk = install_sdk(tmp_path / "sdk", *COOKBOOK)
    common = {"base": str(tiny_model_dir), "batch_size": 8, "lora_rank": 8, "save_every": 3}
    loops = {
        "sl_loop": {"steps": 7, "learning_rate": 3e-3},
        "rl_loop": {
            "steps": 7, "learning_rate": 3e-3, "group_size": 8, "max_tokens": 8, "loss_fn": "importance_sampling",
        },
    }  # fmt: skip
    metrics: dict[str, list[dict]] = {}
    with running_server(tiny_model_dir, tmp_path / "state", *SHARED) as server:
        for name, job in loops.items():
            asked = json.dumps(common | job | {"loop": name, "log": str(tmp_path / name)})
            client = start_client(tmp_path / f"{name}.out", sdk, "tinker_cookbook_loop.py", server.url, asked)
            metrics[name] = [line for line in client.wait(150, server) if line["what"] == "metrics"]
    losses = [line["train_mean_nll"] for line in metrics["sl_loop"] if "train_mean_nll" in line]
    rewards = [line["reward/total"] for line in metrics["rl_loop"] if "reward/total" in line]
    print(losses, rewards)
    assert len(losses) == len(rewards) == 7
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])


#: What is killed, and how: the rest of its kind goes on, or is started anew, by itself; the server is started by hand.
KILLED = ("trainer", "engine", "server", "trainer", "engine", "trainer", "server", "engine", "trainer", "server")


@pytest.mark.long_run
@pytest.mark.timeout(900)
def test_whatever_is_killed_the_client_ends_with_the_same_losses(tiny_model_dir, python_with, tmp_path):
    python, port = python_with("tinker==0.38.0"), free_port()
    job = plan(tiny_model_dir, steps=2 * len(KILLED) + 2, each_step=True, learning_rate=2e-3)
    before = our_processes()
    with running_server(tiny_model_dir, tmp_path / "calm", *SHARED) as server:
        expected = start_client(tmp_path / "calm.out", python, "tinker_client.py", server.url, json.dumps(job)).wait(
            180
        )
    moments = np.random.default_rng(0)
    state = tmp_path / "killed"
    server = start_server(tiny_model_dir, state, *SHARED, port=port)
    client = start_client(tmp_path / "killed.out", python, "tinker_client.py", server.url, json.dumps(job))
    try:
        for number, victim in enumerate(KILLED):
            wait_for_step(client, 2 * number + 1, server)
            time.sleep(moments.uniform(0, 0.4))
            server = killed(server, victim, tiny_model_dir, state, port)
        lines = client.wait(180, server)
    finally:
        client.process.kill()
        status = stop_server(server)
    assert status == 0, server.text()
    assert [line["loss"] for line in steps_of(lines)] == [line["loss"] for line in steps_of(expected)]
    for mine, theirs in zip(steps_of(lines), steps_of(expected), strict=True):
        assert [tokens for tokens, _ in mine["sequences"]] == [tokens for tokens, _ in theirs["sequences"]]
    assert only(lines, "loaded")["ours"] == only(expected, "loaded")["ours"]
    assert_nothing_left(before)


def wait_for_step(client, step: int, server, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while len(steps_of(client.lines())) <= step:
        assert client.process.poll() is None and time.monotonic() < deadline, client.output.read_text() + server.text()
        time.sleep(0.02)


def killed(server, victim: str, base: Path, state: Path, port: int):
    """The server that goes on, or the next one, after a SIGKILL."""
    if victim != "server":
        (process, *_) = server.children(*{"trainer": ["ray::TrainActor"], "engine": ["sglang::scheduler"]}[victim])
        process.kill()
        return server
    (driver,) = [
        child for child in psutil.Process(server.process.pid).children() if "tinker.server" in " ".join(child.cmdline())
    ]
    driver.kill()
    assert server.process.wait(60) not in (0, None)
    return start_server(base, state, *SHARED, port=port)
