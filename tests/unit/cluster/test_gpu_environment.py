"""What trainer and engines are told alike, and which device is a process's own."""

from __future__ import annotations

import os

import pytest

from slime_like.cluster.gpu_environment import device_number, nccl_environment
from slime_like.errors import RunError
from slime_like.sglang_backend.launcher import EngineSpec, _environment

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


@pytest.mark.parametrize(
    ("environ", "flags", "cumem", "nvls"),
    [
        ({}, {}, "0", "0"),  # as SGLang sets them; NCCL itself would take 1 in the trainer
        ({CUMEM: "1"}, {}, "1", "0"),
        ({NVLS: "1"}, {}, "0", "1"),
        ({}, {"enable_nccl_nvls": True}, "0", "1"),
        ({}, {"enable_nccl_nvls": "false"}, "0", "0"),
        # SGLang then turns both on whatever the environment says, so the trainer must follow.
        ({CUMEM: "0", NVLS: "0"}, {"enable_symm_mem": "true"}, "1", "1"),
    ],
)
def test_both_sides_have_the_same_switches(environ, flags, cumem, nvls):
    shared = nccl_environment({"OTHER": "x", **environ}, flags)
    assert shared == {CUMEM: cumem, NVLS: nvls}
    engine = EngineSpec(index=0, model_path="m", log_path="/nowhere", extra_flags=flags, environment=shared)
    for cuda in (True, False):
        assert {name: _environment(engine, cuda)[name] for name in shared} == shared


def test_an_engines_environment_wins_over_its_nodes(monkeypatch):
    monkeypatch.setenv(CUMEM, "1")  # as left on one node of several
    engine = EngineSpec(index=0, model_path="m", log_path="/nowhere", environment={CUMEM: "0"})
    assert _environment(engine, cuda=True)[CUMEM] == "0" and os.environ[CUMEM] == "1"


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "number"),
    [
        (["5"], "5", 0),  # Ray's default: a process sees its own only
        (["5"], None, 5),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1: it sees all
        (["5"], "4,5,6,7", 1),  # … of those that the node was started with
        (["6", "7"], "4, 5, 6, 7", 2),
        (["GPU-b1"], "GPU-a0,GPU-b1", 1),
        (["MIG-7"], "MIG-7", 0),
        ([], "0,1", 0),
        (["1"], "", 0),  # a CPU host whose GPUs are names
    ],
)
def test_a_process_finds_its_own_device(gpu_ids, visible, number):
    assert device_number(gpu_ids, visible) == number


@pytest.mark.parametrize(("gpu_id", "visible"), [("5", "0,1"), ("GPU-b1", None)])
def test_a_device_that_cannot_be_seen_is_named(gpu_id, visible):
    with pytest.raises(RunError, match=gpu_id):
        device_number([gpu_id], visible)
