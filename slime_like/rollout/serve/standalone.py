"""The endpoint without a run: before any SGLang server or router, sessions by any name, samples at their finish."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from slime_like.config.agents import AgentConfig
from slime_like.config.base import ProblemParser, add_flags, flag
from slime_like.config.rollout import RolloutConfig
from slime_like.config.serving import ServingConfig
from slime_like.errors import ConfigError
from slime_like.records import Prompt
from slime_like.rollout.agents.answers import AnswerReader
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.policy import Policy
from slime_like.rollout.serve.answering import Answerer, with_reward
from slime_like.rollout.serve.server import Endpoint, EndpointOptions
from slime_like.rollout.serve.sessions import EpisodeResult, Session, Sessions
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.utils.net import engine_url, http_url, listen_at

#: The only prompt of a session that no data set knows.
_NOBODYS = Prompt(index=0, text="", tokens=np.zeros(0, dtype=np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandaloneConfig:
    """An endpoint that records, in front of an engine"""

    hf_checkpoint: str = flag(help="HF folder of the model that the engine serves: its tokenizer and chat template.")
    engine_url: str = flag(help="SGLang server or router, host:port or URL.")
    engine_api_key_env: str = flag("SLIME_LIKE_ENGINE_API_KEY", help="Environment variable with the engine's key.")
    serve_host: str = flag("127.0.0.1", help="Address to listen at; another than the loopback one needs a key.")
    serve_port: int = flag(8000, help="Port to listen at; 0: a free one.")
    serve_api_key_env: str = flag("SLIME_LIKE_SERVE_API_KEY", help="Environment variable with the endpoint's key.")
    serve_max_requests: int = flag(1024, help="Requests that are answered at a time.")
    serve_max_sessions: int = flag(10000, help="Sessions that are open at a time.")
    serve_idle_s: float = flag(3600.0, help="A session without requests for so long makes room for others.")
    agent_max_turns: int = flag(256, help="Most requests of a session.")
    rollout_max_context_len: int = flag(help="Most tokens of prompt and response together.")
    rollout_max_response_len: int = flag(1024, help="Most new tokens of an answer.")
    rollout_temperature: float = flag(1.0, help="Sampling temperature, whatever clients ask for.")
    rollout_top_p: float = flag(1.0, help="Nucleus sampling, whatever clients ask for.")
    rollout_top_k: int = flag(-1, help="Sample among the k most likely; -1: all.")
    rollout_seed: int = flag(42, help="Seed of the sampling seeds.")
    rollout_request_timeout_s: float = flag(600.0, help="Deadline of one request to the engine, in seconds.")
    env_tool_call_parser: str | None = flag(None, help="SGLang's parser of tool calls, or 'none'.")
    env_reasoning_parser: str | None = flag(None, help="SGLang's parser of thinking, or 'none'.")
    record: str | None = flag(None, help="Append the samples of finished sessions to this JSONL file.")


def read_arguments(argv: Sequence[str]) -> StandaloneConfig:
    """The command line. Raises ConfigError with every problem."""
    parser = ProblemParser(prog="python -m slime_like.rollout.serve", allow_abbrev=False, description=__doc__)
    add_flags(parser, StandaloneConfig)
    values = parser.parse_args(argv)
    if parser.problems:
        raise ConfigError(parser.problems)
    config = StandaloneConfig(**vars(values))
    problems = _serving(config).problems() + _rollout(config).problems()
    try:
        engine_url(config.engine_url)
    except ValueError as error:
        problems.append(f"--engine-url {error}.")
    if config.rollout_max_context_len < 8:
        problems.append(f"--rollout-max-context-len {config.rollout_max_context_len}: must be at least 8.")
    if problems:
        raise ConfigError(problems)
    return config


async def serve(config: StandaloneConfig, announce: Callable[[str], None]) -> None:
    """Answer until TERM or INT. announce: is given the URL once it answers. Raises UserError."""
    tokenizer = load_tokenizer(config.hf_checkpoint)
    key = os.environ.get(config.serve_api_key_env) or None
    problem = _serving(config).key_problem(key)
    if problem:
        raise ConfigError([problem])
    agents = AgentConfig(
        env_tool_call_parser=config.env_tool_call_parser, env_reasoning_parser=config.env_reasoning_parser
    )
    model = _model_config(config.hf_checkpoint)
    reader = AnswerReader(agents, model.get("model_type"))
    client = GenerationClient(
        engine_url(config.engine_url),
        os.environ.get(config.engine_api_key_env),
        _rollout(config),
        concurrency=config.serve_max_requests,
        weight_version=lambda: 0,
    )
    answerer = Answerer(
        client,
        Policy(),
        tokenizer,
        reader,
        template_kwargs={},
        max_turns=config.agent_max_turns,
        sync_timeout_s=config.rollout_request_timeout_s,
        vocab_size=model.get("vocab_size") or 0,
    )
    try:
        await _answer_until_ended(config, _endpoint(config, answerer, key), announce)
    finally:
        await reader.close()
        await client.close()


def _endpoint(config: StandaloneConfig, answerer: Answerer, key: str | None) -> Endpoint:
    sampling = Sampling.for_training(
        _rollout(config), max_context_tokens=config.rollout_max_context_len, seed=str(config.rollout_seed)
    )

    def session(name: str) -> Session:
        # The name is part of the seed: sessions that ask the same must not be given the same answer.
        return Session(name, _NOBODYS, 0, dataclasses.replace(sampling, seed=f"{sampling.seed}/{name}"))

    sessions = Sessions(create=session, most=config.serve_max_sessions, idle_s=config.serve_idle_s)
    return Endpoint(
        answerer,
        sessions,
        EndpointOptions(
            model=os.path.basename(os.path.normpath(config.hf_checkpoint)),
            max_context_tokens=config.rollout_max_context_len,
            key=key,
            most_requests=config.serve_max_requests,
        ),
        one_off=lambda: session(uuid.uuid4().hex),
        finished=lambda session, result: _finished(sessions, config.record, session, result),
    )


async def _answer_until_ended(config: StandaloneConfig, endpoint: Endpoint, announce: Callable[[str], None]) -> None:
    try:
        listener = listen_at(config.serve_host, config.serve_port)
    except OSError as error:
        where = f"--serve-host {config.serve_host} --serve-port {config.serve_port}"
        raise ConfigError([f"{where}: the endpoint cannot listen there: {error.strerror or error}."]) from error
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with contextlib.closing(listener):
        await endpoint.start(listener)
        try:
            announce(http_url(*listener.getsockname()[:2]))
            await ended.wait()
        finally:
            await endpoint.close()


def _finished(sessions: Sessions, path: str | None, session: Session, result: EpisodeResult) -> dict:
    """The samples as JSON; appended to the file too. The session is forgotten."""
    sessions.close(session)
    rows = session.rows()
    samples = [
        {
            "session_id": session.name,
            "segment_index": sample.segment_index,
            "tokens": sample.tokens.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "engine_logprobs": sample.engine_logprobs.tolist(),
            "weight_versions": sample.weight_versions.tolist(),
            "response": sample.response,
            "status": sample.status,
            "reward": sample.reward,
            "metadata": result.metadata,
        }
        for sample in with_reward(rows.samples, result.reward, result.metadata)
    ]
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(sample) + "\n" for sample in samples))
    return {"samples": samples, "violations": [str(violation) for violation in rows.violations]}


def _model_config(folder: str) -> dict:
    """The folder's config.json; {} without one. model_type says the parsers' defaults."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def _serving(config: StandaloneConfig) -> ServingConfig:
    names = {field.name for field in dataclasses.fields(ServingConfig)}
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    return ServingConfig(serve_rollout=True, **values | {"serve_port": config.serve_port or None})


def _rollout(config: StandaloneConfig) -> RolloutConfig:
    names = {field.name for field in dataclasses.fields(RolloutConfig)}
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    return RolloutConfig(
        **values, rollout_allow_filtered_sampling=config.rollout_top_p < 1 or config.rollout_top_k != -1
    )
