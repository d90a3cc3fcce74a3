"""The server's parts put together: store, service, backends and API."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI

from slime_like.tinker.api.app import make_app
from slime_like.tinker.api.settings import ApiSettings, ServedModel
from slime_like.tinker.backends.engines import EngineSampling, SamplingOptions
from slime_like.tinker.backends.sample_bodies import EngineLimits
from slime_like.tinker.backends.start import Cluster
from slime_like.tinker.backends.trainer import GroupTraining, TrainerOptions
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.options import ServerCommand
from slime_like.tinker.service import CallService
from slime_like.tinker.store.database import Database


@contextlib.asynccontextmanager
async def running_app(command: ServerCommand, cluster: Cluster) -> AsyncIterator[FastAPI]:
    """All of the server but its socket; what it starts, and what runs on the cluster, ends with the block."""
    server = command.server
    state = os.path.abspath(server.state_folder)
    trainer = GroupTraining(cluster.start_trainer, trainer_options(command), first=cluster.first_trainer)
    engines = EngineSampling(cluster.fleet, sampling_options(command))
    database = Database(server.database)
    service = CallService(database, trainer, engines, service_settings(command), staging=os.path.join(state, "staging"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        stack.push_async_callback(engines.close)
        stack.push_async_callback(trainer.close)
        await database.upgrade()
        await trainer.begin()
        await service.start()
        stack.push_async_callback(service.close)
        yield make_app(service, database, ApiSettings(models=(served_model(command),)))


def trainer_options(command: ServerCommand) -> TrainerOptions:
    """Of the command line."""
    server = command.server
    return TrainerOptions(
        base_model=server.name,
        model=command.config.model,
        context_length=command.context_length,
        lora_alpha=server.default_lora_alpha,
        max_rank=server.max_lora_rank,
        max_resident=server.max_adapters_resident,
        shares_micro_batches=server.tenant_micro_batches == "shared",
    )


def sampling_options(command: ServerCommand) -> SamplingOptions:
    """Of the command line."""
    server, config = command.server, command.config
    limits = EngineLimits(
        context_length=command.context_length, vocab_size=config.model.vocab_size, takes_seeds=command.takes_seeds
    )
    return SamplingOptions(
        base_folder=os.path.abspath(server.base_model),
        limits=limits,
        max_adapters=server.max_cpu_loras,
        max_rank=server.max_lora_rank,
        concurrency=config.engine.sglang_server_concurrency,
        request_timeout_s=config.rollout.rollout_request_timeout_s,
    )


def service_settings(command: ServerCommand) -> ServiceSettings:
    """Of the command line."""
    server = command.server
    return ServiceSettings(
        state_folder=os.path.join(os.path.abspath(server.state_folder), "state"),
        weights_folder=server.weights,
        batch_tokens=server.batch_tokens,
        max_adapters_resident=server.max_models,
        max_whole_models_resident=server.max_whole_models,
        max_samples_running=server.max_samples_running,
        max_samples_running_a_tenant=server.max_samples_a_tenant,
        max_requests_a_tenant=server.max_requests_a_tenant,
        max_tokens_a_tenant=server.max_tokens_a_tenant,
        sampling_weight=server.sampling_weight,
        turn_s=server.turn_s,
        shared_devices=command.config.placement.colocate,
        max_ephemeral_samplers=server.max_ephemeral_samplers,
        snapshot_every_steps=server.snapshot_every_steps,
        session_timeout_s=server.session_timeout_s,
    )


def served_model(command: ServerCommand) -> ServedModel:
    """What clients are told of the base model."""
    folder = os.path.abspath(command.server.base_model)
    return ServedModel(
        name=command.server.name,
        context_length=command.context_length,
        tokenizer=folder,
        architecture=architecture_of(folder),
        max_lora_rank=command.server.max_lora_rank,
    )


def architecture_of(folder: str) -> str:
    """HF's name of what the folder holds."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return str((json.load(file).get("architectures") or [""])[0])
