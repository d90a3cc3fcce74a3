"""Agents in an interpreter of their own: what travels, what goes wrong, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from slime_like.errors import PluginError
from slime_like.rollout.serve.agent_host import AgentFailure
from slime_like.rollout.serve.agent_process import AgentProcess

AGENTS = """
import asyncio, os, sys, time, tokenize  # the last is a module's name beside the runner, too

async def echo(base_url, prompt, request_kwargs, metadata):
    await asyncio.sleep(metadata.get("sleep_s", 0))
    return {"reward": request_kwargs["n"], "metadata": {"pid": os.getpid(), "said": [base_url, prompt]}}

def plain(base_url, prompt, request_kwargs, metadata):
    print("plain plays", os.path.basename(tokenize.__file__))
    return None

async def raises(base_url, prompt, request_kwargs, metadata):
    raise KeyError("plan")

def stops(base_url, prompt, request_kwargs, metadata):
    raise StopIteration

def no_json(base_url, prompt, request_kwargs, metadata):
    return {"reward": {1, 2}}

async def waits(base_url, prompt, request_kwargs, metadata):
    try:
        await asyncio.sleep(60)
    finally:
        open(metadata["file"], "w").close()

async def blocks(base_url, prompt, request_kwargs, metadata):
    time.sleep(60)

def ends(base_url, prompt, request_kwargs, metadata):
    if metadata["ends"]:
        print("goodbye", flush=True)
        os._exit(3)
    return {"reward": 1.0}

def two_arguments(base_url, prompt):
    pass
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Runs `scenario(process)` with a process for an agent of AGENTS; ends it afterwards."""
    (tmp_path / "agents_of_ours.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)

    def run(name: str, scenario, python: str = sys.executable):
        async def all_of_it():
            process = AgentProcess(python, f"agents_of_ours.{name}", log_path=str(tmp_path / "logs/agents.log"))
            try:
                await process.start()
                return await scenario(process)
            finally:
                await process.close()

        return asyncio.run(all_of_it())

    return run


def arguments(**metadata):
    return ("http://x/v1", [{"role": "user", "content": "漢\n"}], {"n": 0.5}, metadata)


def test_calls_run_side_by_side_in_another_process(played):
    async def scenario(process):
        begin = time.monotonic()
        answers = await asyncio.gather(*(process.call(*arguments(sleep_s=0.5)) for _ in range(20)))
        return answers, time.monotonic() - begin

    answers, seconds = played("echo", scenario)
    assert len(answers) == 20 and {answer["reward"] for answer in answers} == {0.5} and seconds < 5
    (pid,) = {answer["metadata"]["pid"] for answer in answers}
    assert pid != os.getpid() and not psutil.pid_exists(pid), "and it has ended with us"
    assert answers[0]["metadata"]["said"] == list(arguments()[:2])


def test_a_plain_function_may_give_nothing_and_what_it_prints_is_in_the_log(played, tmp_path):
    assert played("plain", lambda process: process.call(*arguments())) is None
    assert "plain plays tokenize.py" in (tmp_path / "logs/agents.log").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [("raises", "raised KeyError: 'plan'"), ("stops", "StopIteration"), ("no_json", "set is not JSON serializable")],
)
def test_what_an_agent_raises_is_named_and_the_next_one_plays(played, name, message, tmp_path):
    async def scenario(process):
        for _ in range(2):
            with pytest.raises(AgentFailure, match=message):
                await process.call(*arguments())

    played(name, scenario)
    assert "Traceback" in (tmp_path / "logs/agents.log").read_text()


def test_a_deadline_ends_the_coroutine_there(played, tmp_path):
    file = tmp_path / "ended"

    async def scenario(process):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.call(*arguments(file=str(file)))
        for _ in range(100):
            if file.exists():
                return
            await asyncio.sleep(0.1)

    played("waits", scenario)
    assert file.exists()


def test_an_agent_that_blocks_its_loop_holds_up_no_deadline_and_ends_with_us(played):
    async def scenario(process):
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await process.call("u", [{"role": "user", "content": "x" * 4_000_000}], {}, {})

    begin = time.monotonic()
    played("blocks", scenario)
    assert time.monotonic() - begin < 20


def test_a_process_that_ends_fails_its_episodes_and_is_started_again(played):
    async def scenario(process):
        with pytest.raises(AgentFailure, match="the agents' process ended[^$]*goodbye"):
            await process.call(*arguments(ends=True))
        return await process.call(*arguments(ends=False))

    assert played("ends", scenario) == {"reward": 1.0}


@pytest.mark.parametrize(
    ("name", "python", "message"),
    [
        ("nothing", sys.executable, "has no attribute 'nothing'"),
        ("two_arguments", sys.executable, "too many positional arguments"),
        ("echo", "/bin/true", "ended with status 0"),
        ("echo", "/no/such/python", "cannot be started"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_the_start(played, name, python, message):
    with pytest.raises(PluginError, match=message):
        played(name, lambda process: process.call(*arguments()), python)


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(prefix="slt", dir="/tmp") as folder:  # pytest's own are too long for sockets
        yield Path(folder)


def test_it_dies_with_us_and_takes_its_folder_along(tmp_path, short_folder):
    (tmp_path / "agents_of_ours.py").write_text(AGENTS)
    script = f"""
import asyncio
from slime_like.rollout.serve.agent_process import AgentProcess

async def main():
    process = AgentProcess({sys.executable!r}, "agents_of_ours.echo", log_path={str(tmp_path / "log")!r})
    await process.start()
    print(process._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    root = str(Path(__file__).parents[4])
    ours = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ours.stdout is not None
    pid = int(ours.stdout.readline())
    assert psutil.pid_exists(pid) and len(list(short_folder.iterdir())) == 1
    ours.send_signal(signal.SIGKILL)
    ours.wait(timeout=10)
    ours.stdout.close()
    deadline = time.monotonic() + 60
    while (psutil.pid_exists(pid) or list(short_folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid) and not list(short_folder.iterdir())


def test_a_temporary_folder_with_a_long_name_is_no_obstacle(played, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert played("echo", lambda process: process.call(*arguments()))["reward"] == 0.5
    assert not list(long.iterdir())
