"""--update-weight-mode delta: what it needs, what it does not go with, and which receiver an external engine has."""

from __future__ import annotations

import pytest

from arguments import parse_args
from slime_like.cluster.receivers import Receivers
from slime_like.errors import ConfigError, EngineError
from slime_like.planning.placement import cannot_run_yet, make_plan
from slime_like.records import EngineEndpoint

BASE = (
    "--hf-checkpoint /m --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4"
    " --group-query-attention --num-query-groups 2 --kv-channels 32 --vocab-size 320 --normalization RMSNorm --swiglu"
    " --disable-bias-linear --qk-layernorm --prompt-data /d --rm-type math --num-rollout 1 --actor-num-gpus-per-node 2"
    " --plan"
)
OWN = "--rollout-num-gpus 2"
EXTERNAL = "--rollout-external --rollout-external-engine-addrs a:1 b:2"
DELTA = "--update-weight-mode delta"


def config_of(*more: str):
    return parse_args(" ".join((BASE, *more)).split()).config


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            (OWN, "--update-weight-delta-encoding xor"),
            "--update-weight-delta-encoding does nothing without --update-weight-mode delta",
        ),
        ((OWN, "--update-weight-local-checkpoint-dir /l"), "--update-weight-local-checkpoint-dir does nothing without"),
        (
            (EXTERNAL, "--rollout-external-receiver-addrs a:3 b:4"),
            "--rollout-external-receiver-addrs does nothing without",
        ),
        (
            (OWN, DELTA, "--update-weight-transport disk"),
            "--update-weight-transport disk does not go with --update-weight-mode delta",
        ),
        ((DELTA, "--colocate"), "does not go with --colocate"),
        ((EXTERNAL, DELTA), "0 are given for 2"),
        ((EXTERNAL, DELTA, "--rollout-external-receiver-addrs a:3"), "1 are given for 2"),
        ((EXTERNAL, DELTA, "--rollout-external-receiver-addrs a:3 b"), "'b' has no port"),
        ((OWN, DELTA, "--rollout-external-receiver-addrs a:3"), "1 are given for 0"),
        (
            (EXTERNAL, DELTA, "--rollout-external-receiver-addrs a:3 b:4 --update-weight-local-checkpoint-dir /l"),
            "for receivers that we start",
        ),
        ((OWN, DELTA, "--update-weight-delta-checksum adler32"), "Fix: xxh3-128"),
        ((OWN, DELTA, "--update-weight-delta-encoding zip"), "unknown"),
    ],
)
def test_what_cannot_be_is_refused(more, message):
    with pytest.raises(ConfigError) as refused:
        config_of(*more)
    assert any(message in problem for problem in refused.value.problems), refused.value.problems


def test_the_plan_says_delta():
    config = config_of(OWN, DELTA)
    assert config.sync.delta_encoding == "xor"
    assert make_plan(config).transport == "delta"
    assert cannot_run_yet(make_plan(config)) == []


def test_an_engine_on_two_machines_is_refused():
    config = config_of("--num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4", DELTA)
    (problem,) = cannot_run_yet(make_plan(config))
    assert "engine 0 runs on 2 machines" in problem and "Fix: --update-weight-mode full" in problem


def test_external_engines_have_their_own_receivers(monkeypatch):
    config = config_of(
        EXTERNAL,
        DELTA,
        "--rollout-external-receiver-addrs a:3 https://b --rollout-external-receiver-api-key-env SOME_KEY",
    )
    monkeypatch.setenv("SOME_KEY", "k" * 20)
    endpoints = [
        EngineEndpoint(index=index, url=f"http://{host}", external=True) for index, host in enumerate(("a:1", "b:2"))
    ]
    addressed = Receivers(config, "/run").beside(endpoints)
    assert [(one.receiver_url, one.receiver_key) for one in addressed] == [
        ("http://a:3", "k" * 20),
        ("https://b", "k" * 20),
    ]
    assert "k" * 20 not in repr(addressed)
    (again,) = Receivers(config, "/run").beside([EngineEndpoint(index=2, url="http://b:2", external=True)])
    assert again.receiver_url == "https://b", "one that came back, under another number"
    with pytest.raises(EngineError, match="engine 3 at http://c:3 has no receiver beside it"):
        Receivers(config, "/run").beside([EngineEndpoint(index=3, url="http://c:3", external=True)])
