"""Real SGLang servers, started once for all contract tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from slime_like.sglang_backend.shared_memory import shared_directory
from slime_like.utils.guard import group_members
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import FLAGS, TINY, Served, make_model, options, prompt, prompt_logprobs, sync


@pytest.fixture(scope="session")
def models() -> dict:
    """Seed -> model; engines start with seed 1."""
    return {seed: make_model(seed) for seed in (1, 2)}


@pytest.fixture(scope="session")
def model_folder(models, tmp_path_factory) -> Path:
    """HF folder of seed 1, with the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("contract") / "model"
    models[1].save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def _serve(model_folder: Path, log_path: Path, tp_size: int, flags: dict) -> Iterator[Served]:
    spec = EngineSpec(
        index=tp_size,
        model_path=str(model_folder),
        tp_size=tp_size,
        dtype="float32",
        log_path=str(log_path),
        context_length=1024,
        extra_flags=flags,
    )
    engine = launch_engine(spec, timeout_s=120)
    try:
        client = EngineClient(engine.endpoint, timeout_s=30)
        yield Served(engine, client, prompt_logprobs(client, prompt(1)))
        members = group_members(engine.pid)
        files = {path for pid in members for path in _shared_files(pid)}
    finally:
        engine.close()
    assert len(members) >= 3, "server, scheduler and detokenizer were there before"
    assert group_members(engine.pid) == []
    assert files and not any(map(os.path.exists, files))
    shared = os.listdir(shared_directory()) if os.path.exists(shared_directory()) else []
    assert [name for name in shared if name.startswith(f"{os.getpid()}-")] == []


def _shared_files(pid: int) -> set[str]:
    """SGLang's files in shared memory that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[-1] for line in maps if "/dev/shm/sglang_loads_" in line}


@pytest.fixture(scope="session")
def tp1(model_folder, tmp_path_factory) -> Iterator[Served]:
    """One engine of one rank, with a tokenizer, for the whole session."""
    yield from _serve(model_folder, tmp_path_factory.mktemp("logs") / "engine-1.log", 1, {})


@pytest.fixture(scope="session")
def tp2(model_folder, tmp_path_factory) -> Iterator[Served]:
    """One engine of two ranks for the whole session."""
    yield from _serve(model_folder, tmp_path_factory.mktemp("logs") / "engine-2.log", 2, FLAGS)


@pytest.fixture
def served(request, tp1) -> Served:
    """The engine of one rank with the weights of seed 1, whatever the test before has sent it."""
    return _at_seed_1(tp1, request)


def _at_seed_1(one: Served, request) -> Served:
    folder = request.getfixturevalue("tmp_path") / "seed-1"
    publisher = make_publisher(options([one], "disk", directory=folder))
    sync([one], request.getfixturevalue("models")[1], [publisher], "disk", folder)
    return one
