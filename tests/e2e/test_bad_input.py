"""What users get for what goes wrong before and at start: one clear message, the right status, nothing left behind."""

import socket

import pytest

from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = pytest.mark.e2e


@pytest.fixture
def base(tiny_model_dir, tiny_data_dir):
    return [
        *SMALL_RUN,
        "--hf-checkpoint",
        tiny_model_dir,
        "--prompt-data",
        f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node",
        "1",
        "--colocate",
    ]


def replaced(flags, name, value):
    flags = list(flags)
    flags[flags.index(name) + 1] = value
    return flags


def refused(flags, tmp_path, *parts):
    """Status 2, no traceback, all parts in the message, and no run begun."""
    run = run_train(*flags, run_dir=tmp_path / "run", timeout=60)
    assert run.returncode == 2, run.output
    assert "Traceback" not in run.output
    for part in parts:
        assert part in run.output, run.output
    return run


def test_malformed_line_is_named_by_number(base, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "label": "b"}\n{"prompt": "a", \n')
    refused(replaced(base, "--prompt-data", path), tmp_path, "bad.jsonl", "line 2")
    assert not (tmp_path / "run").exists()


def test_missing_key_names_the_keys_there_are(base, tmp_path):
    refused(replaced(base, "--input-key", "question"), tmp_path, "question", "prompt")


def test_wrong_paths_and_unknown_reward_come_together(base, tmp_path):
    flags = replaced(replaced(base, "--hf-checkpoint", "/nowhere"), "--prompt-data", "/nowhere/x.jsonl")
    flags[flags.index("--custom-rm-path")] = "--rm-type"
    refused(
        flags,
        tmp_path,
        "--hf-checkpoint /nowhere: no such folder",
        "/nowhere/x.jsonl: no such file",
        "--rm-type tests.e2e.rewards.even_tokens is unknown",
    )


def test_plugin_that_does_not_exist(base, tmp_path):
    refused(replaced(base, "--custom-rm-path", "tests.e2e.rewards.even_token"), tmp_path, "even_token", "even_tokens")


def test_batch_sizes_that_do_not_divide(base, tmp_path):
    refused([*base, "--global-batch-size", "5"], tmp_path, "2 steps of 5 samples are not the rollout's 16")


def test_too_few_gpus_is_said_at_once(base, tmp_path, ray_cluster):
    run = run_train(
        *replaced(base, "--actor-num-gpus-per-node", "8"),
        run_dir=tmp_path / "run",
        timeout=60,
        env=ray_cluster.environment,
    )
    assert run.returncode == 2, run.output
    assert "the plan needs 8 GPUs, but the Ray cluster has 4" in run.output and "Fix:" in run.output


def test_engine_that_dies_at_start_shows_its_log(base, tmp_path):
    before = our_processes()
    run = run_train(*base, "--sglang-context-length", "999999", run_dir=tmp_path / "run", timeout=120)
    assert run.returncode == 1, run.output
    assert "engine 0" in run.output and "ended with status" in run.output and "999999" in run.output
    assert_nothing_left(before)


@pytest.mark.long_run  # its words: unit/sglang_backend/test_router.py; an end within the start: the engine above
def test_port_taken_is_named(base, tmp_path):
    before = our_processes()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = run_train(*base, "--sglang-router-port", port, run_dir=tmp_path / "run", timeout=120)
    assert run.returncode != 0
    assert str(port) in run.output and "Traceback" not in run.output
    assert_nothing_left(before)


# Its words: unit/rollout/test_manager.py; an error in mid-run that ends all: test_sync_faults.py and test_roles.py.
@pytest.mark.long_run
def test_reward_that_raises_names_the_sample(base, tmp_path):
    before = our_processes()
    run = run_train(
        *replaced(base, "--custom-rm-path", "tests.e2e.rewards.raises"), run_dir=tmp_path / "run", timeout=120
    )
    assert run.returncode == 1, run.output
    assert "RewardError" in run.output and "no such key in the label" in run.output and "prompt" in run.output
    assert_nothing_left(before)
