"""What we say to an engine, held against the sources of both SGLang versions that the sets of packages have: 0.5.23,
which is installed here, and 0.5.17, of which a list is kept (tests/helpers/sglang_interface.py writes it).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import EngineError
from slime_like.planning.engines import EnginePlan
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.adapter_client import AdapterClient
from slime_like.sglang_backend.launcher import EngineSpec, _server_argv
from slime_like.sglang_backend.server_args import RESERVED, SWITCH
from tests.helpers.sglang_interface import interface_of
from tests.unit.sglang_backend.fake_http import serve

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3"
LISTED = "0.5.17"
#: What 0.5.17 does not have, and what becomes of it: without update sessions none is opened; its checker hashes all.
MISSING = {LISTED: {"/begin_weight_update", "/end_weight_update", "/weights_checker skip_tensor_list"}}
#: Not in http_server.py but in routers of their own.
ELSEWHERE = {"/v1/loads"}


def installed_version() -> str:
    return importlib.metadata.version("sglang")


def interface(version: str) -> dict:
    if version == LISTED:
        return json.loads(Path(__file__).with_name(f"sglang-{LISTED}.json").read_text())
    return interface_of(Path(importlib.util.find_spec("sglang").submodule_search_locations[0]))


VERSIONS = pytest.mark.parametrize("version", [LISTED, installed_version()])

#: Everything in a run's config that changes an engine's command line.
CONFIGS = {
    "plain": {},
    "colocate, in bf16": {"placement": PlacementConfig(colocate=True), "optimizer": OptimizerConfig(bf16=True)},
    "in fp32, talkative": {
        "optimizer": OptimizerConfig(bf16=False),
        "observability": ObservabilityConfig(log_level="debug"),
        "rollout": RolloutConfig(rollout_max_context_len=512),
    },
    "routing replay": {"loss": LossConfig(use_rollout_routing_replay=True)},
    "adapters": {
        "model": ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11),
        "lora": LoraConfig(lora_rank=4),
        "sync": SyncConfig(update_weight_mode="adapter"),
    },
    "user's own": {
        "engine": EngineConfig(sglang={"mem_fraction_static": "0.7", "custom_weight_loader": ["mine.load"]})
    },
}


def specs() -> Iterator[tuple[str, EngineSpec]]:
    """(what it is, the engine) for every config on one machine and on two."""
    bundles = SimpleNamespace(gpus=[SimpleNamespace(gpu_id=str(number)) for number in range(2)], have_cuda=False)
    for what, groups in CONFIGS.items():
        config = RunConfig(checkpoint=CheckpointConfig(hf_checkpoint=str(MODEL)), **groups)
        processes = EngineProcesses(config, plan=None, bundles=bundles, run_dir="/runs/r")
        yield what, processes._spec(EnginePlan(index=0, bundles=(0,), tp=1, node_ranks=(0,)), "127.0.0.1", 0, [0])
        two = processes._spec(EnginePlan(index=1, bundles=(0, 1), tp=2, node_ranks=(0, 1)), "127.0.0.1", 1, [1])
        yield f"{what}, on two machines", _meeting_at(two, "10.0.0.1:5000")


def _meeting_at(spec: EngineSpec, address: str) -> EngineSpec:
    return EngineSpec(**(vars(spec) | {"dist_init_addr": address}))


def problems(argv: list[str], arguments: dict) -> list[str]:
    """What SGLang would refuse of a command line: unknown names, values of switches, values that are no choice."""
    refused = []
    for word in argv:
        if not word.startswith("--"):
            continue
        name, given, value = word[2:].partition("=")
        argument = arguments.get(name.replace("-", "_"))
        if argument is None:
            refused.append(f"{word}: unknown")
            continue
        _, kind, choices, number = argument
        if given and kind == SWITCH or (given and choices and value not in choices):
            refused.append(f"{word}: not one of {choices}")
        if given and number:
            {"int": int, "float": float}[number](value)
    return refused


@VERSIONS
@pytest.mark.parametrize("cuda", [True, False])
def test_every_argument_of_ours_is_known(version, cuda):
    arguments = interface(version)["arguments"]
    argv = {what: [*_server_argv(spec, 30000, cuda), "--config", "server.yaml"] for what, spec in specs()}
    argv["no FlashAttention 3"] = ["--attention-backend=flashinfer"]
    assert {what: refused for what, words in argv.items() if (refused := problems(words, arguments))} == {}
    seen = {word.partition("=")[0] for words in argv.values() for word in words if word.startswith("--")}
    assert {"--nnodes", "--dist-init-addr", "--enable-return-routed-experts", "--custom-weight-loader"} <= seen
    assert ("--enable-memory-saver" in seen) is cuda and ("--device" in seen) is not cuda
    # In the file beside the command line, and what is refused as a user's flag.
    assert "api_key" in arguments and set(RESERVED) <= {field for field, *_ in arguments.values()}


def test_a_wrong_command_line_is_noticed():
    arguments = interface(LISTED)["arguments"]
    words = ["--attention-backend=fastest", "--sleep-on-idle=1", "--no-such", "--tp-size=2"]
    assert [text.partition(":")[0] for text in problems(words, arguments)] == words[:3]


def said_to_an_engine() -> list[tuple[str, dict | None]]:
    """(path, body) of every request that the client has."""
    with serve({}) as server:  # which knows none: the client's answers to that are other tests' matter
        client = AdapterClient(EngineEndpoint(index=0, url=server.url, api_key=None, tp_size=1), timeout_s=5.0)
        group = {"group_name": "g", "timeout_s": 5.0}
        for ask in (
            client.health,
            client.server_info,
            client.model_info,
            client.models,
            lambda: client.generate([1], {}, return_logprob=True),
            lambda: client.prompt_log_probs([[1, 2]]),
            client.abort_all,
            lambda: client.pause_generation("abort"),
            client.continue_generation,
            lambda: client.flush_cache(0.1),
            client.begin_weight_update,
            client.close_weight_update,
            client.num_requests,
            lambda: client.update_weight_version("1"),
            lambda: client.update_weights_from_tensor(["x"], load_format="x"),
            lambda: client.update_weights_from_disk("/m"),
            lambda: client.init_weights_update_group(
                address="h", port=1, rank_offset=1, world_size=2, backend="nccl", **group
            ),
            lambda: client.update_weights_from_distributed(names=[], dtypes=[], shapes=[], load_format=None, **group),
            lambda: client.destroy_weights_update_group("g"),
            client.weights_checksum,
            lambda: client.buffer_checksums("b"),
            lambda: client.release_memory_occupation(["weights"]),
            lambda: client.resume_memory_occupation(["weights"]),
            lambda: client.load_adapter("policy@1", "/w"),
            lambda: client.load_adapter_tensors("policy@1", b"x", {}, {}),
            lambda: client.unload_adapter("policy@1"),
        ):
            with contextlib.suppress(EngineError):
                ask()
        return [(path, body) for _, path, body in server.calls]


@VERSIONS
def test_every_request_of_ours_has_its_route_and_its_fields(version):
    routes = interface(version)["routes"]
    missing = set()
    said = said_to_an_engine()
    assert len({path for path, _ in said}) > 20
    for path, body in said:
        # What a version calls otherwise is asked under the other name.
        names = {path, path.replace("/get_", "/")}
        if path in ELSEWHERE or names & set(routes) == set():
            missing |= {path} - ELSEWHERE
        elif path in routes and routes[path]:
            missing |= {f"{path} {field}" for field in set(body or {}) - set(routes[path])}
    assert missing == MISSING.get(version, set())
