"""External engines at the start of a run: asked what they serve before anything starts, refused where they cannot serve
this trainer.
"""

from __future__ import annotations

import dataclasses
import os

from slime_like.cluster.ray_session import running_cluster
from slime_like.config.adapter_rules import versions_at_once
from slime_like.config.lora import served_modules
from slime_like.config.quantisation import scheme_of
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, EngineError
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan, cannot_run_yet
from slime_like.records import EngineEndpoint
from slime_like.rollout.data_source import DataSource, context_tokens
from slime_like.sglang_backend.external_server import (
    ExternalServer,
    adapter_disagreements,
    answers,
    disagreements,
    inspect_server,
    quantisation_disagreements,
)
from slime_like.sglang_backend.launcher import host_has_cuda

#: Deadline of one question to a server, in seconds.
_ASK_TIMEOUT_S = 20.0


def with_servers(config: RunConfig, plan: PlacementPlan, data: DataSource | None) -> tuple[RunConfig, PlacementPlan]:
    """Config and plan with the engines' sizes as the servers tell them; unchanged where no engine is external.

    Raises ConfigError with everything that disagrees, EngineError for a server that cannot be reached or refuses the
    key.
    """
    if not any(engine.external_url for engine in plan.engines):
        return config, plan
    key_variable = config.placement.rollout_external_api_key_env
    key = os.environ.get(key_variable)
    servers = [
        inspect_server(str(engine.external_url), key, _ASK_TIMEOUT_S, key_variable=key_variable)
        for engine in plan.engines
    ]
    problems = [problem for server in servers for problem in _problems(config, server, data)]
    num_gpus, flag_gpus = sum(server.num_gpus for server in servers), config.placement.rollout_num_gpus
    if flag_gpus is not None and flag_gpus != num_gpus:
        sizes = ", ".join(f"{server.num_gpus} at {server.url}" for server in servers)
        problems.append(
            f"--rollout-num-gpus {flag_gpus}, but the external engines have {num_gpus} GPUs: {sizes}. Fix: leave it"
            " out; it is taken from them."
        )
    engines = tuple(
        dataclasses.replace(engine, tp=server.tp_size, pp=server.pp_size, dp=server.dp_size)
        for engine, server in zip(plan.engines, servers, strict=True)
    )
    problems += cannot_run_yet(dataclasses.replace(plan, engines=engines))
    if problems:
        raise ConfigError(problems)
    rollout = dataclasses.replace(plan.roles["rollout"], tp=engines[0].tp, pp=engines[0].pp)
    placement = dataclasses.replace(config.placement, rollout_num_gpus=num_gpus)
    return dataclasses.replace(config, placement=placement), dataclasses.replace(
        plan, engines=engines, roles=plan.roles | {"rollout": rollout}
    )


def joining_plan(config: RunConfig, url: str, index: int) -> EnginePlan:
    """An external engine that is to join a run that is up, as number `index`, with the sizes that it tells.

    Raises EngineError with everything that disagrees, or if it cannot be reached or refuses the key.
    """
    key_variable = config.placement.rollout_external_api_key_env
    server = inspect_server(url, os.environ.get(key_variable), _ASK_TIMEOUT_S, key_variable=key_variable)
    problems = _problems(config, server, None)
    if problems:
        raise EngineError(" ".join(problems))
    return EnginePlan(
        index=index, bundles=(), tp=server.tp_size, pp=server.pp_size, dp=server.dp_size, external_url=url
    )


def external_endpoint(config: RunConfig, engine: EnginePlan) -> EngineEndpoint:
    """Where an external engine answers, with the sizes that it told before the start."""
    assert engine.external_url is not None, "it runs elsewhere"
    key = os.environ.get(config.placement.rollout_external_api_key_env)
    return EngineEndpoint(index=engine.index, url=engine.external_url, api_key=key, tp_size=engine.tp, external=True)


def returned_endpoint(config: RunConfig, engine: EnginePlan) -> EngineEndpoint | None:
    """Where an external engine that was gone answers again; None as long as it does not.

    Raises EngineError if what answers there now cannot serve this trainer.
    """
    endpoint = external_endpoint(config, engine)
    if not answers(endpoint):
        return None
    key_variable = config.placement.rollout_external_api_key_env
    server = inspect_server(endpoint.url, endpoint.api_key, _ASK_TIMEOUT_S, key_variable=key_variable)
    problems = _problems(config, server, None)
    if (server.tp_size, server.pp_size, server.dp_size) != (engine.tp, engine.pp, engine.dp):
        problems.append(f"{server.url}: its parallel sizes are not those that it had.")
    if problems:
        raise EngineError(f"engine {engine.index}, which answers again: {' '.join(problems)}")
    return endpoint


def _problems(config: RunConfig, server: ExternalServer, data: DataSource | None) -> list[str]:
    assert config.checkpoint.hf_checkpoint, "--hf-checkpoint is checked before"
    longest = max((len(row.tokens) for row in data.rows), default=0) if data is not None else 0
    needed = min(context_tokens(config), longest + config.rollout.rollout_max_response_len)
    problems = disagreements(
        server,
        hf_checkpoint=config.checkpoint.hf_checkpoint,
        dtype=_trainer_dtype(config),
        needed_context=needed,
        routed_experts=config.loss.use_rollout_routing_replay,
    )
    scheme = scheme_of(config.sync.rollout_quantization)
    if not config.sync.sends_adapters:
        quantises_itself = scheme is None and config.sync.custom_weight_transform_path
        return problems + ([] if quantises_itself else quantisation_disagreements(server, scheme))
    modules = served_modules(config.lora, config.model)
    return problems + adapter_disagreements(
        server, rank=config.lora.lora_rank, modules=modules, num_versions=versions_at_once(config)
    )


def _trainer_dtype(config: RunConfig) -> str | None:
    """What the trainer computes in, by its own rule; None if its hosts may be others than this one."""
    if config.optimizer.bf16 is not None:
        return "bfloat16" if config.optimizer.bf16 else "float32"
    if host_has_cuda():
        return "bfloat16"
    return "float32" if running_cluster() is None else None
