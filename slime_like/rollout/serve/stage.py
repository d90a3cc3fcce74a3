"""Everything that a run needs to be played against, made once."""

from __future__ import annotations

import logging
import os

from slime_like.config.families import family_of
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError
from slime_like.rollout.agents.answers import AnswerReader
from slime_like.rollout.data_source import context_tokens
from slime_like.rollout.generate import GenerationClient
from slime_like.rollout.policy import Policy
from slime_like.rollout.serve.agent_host import AgentHost, CallsAgents
from slime_like.rollout.serve.agent_process import AgentProcess
from slime_like.rollout.serve.answering import Answerer
from slime_like.rollout.serve.player import ServedPlayer, WaitingEpisodes
from slime_like.rollout.serve.server import Endpoint, EndpointOptions
from slime_like.rollout.serve.sessions import Sessions
from slime_like.utils.net import http_url, listen_at

logger = logging.getLogger(__name__)

#: Deadlines of one request that an answer may wait for a weight sync.
_SYNC_DEADLINES = 10


class ServeStage:
    """The endpoint, and the players of training and evaluation over it. Make it in the event loop that serves.

    Listens from the beginning, answers after `start`. Raises ConfigError and PluginError.
    """

    def __init__(self, config: RunConfig, tokenizer, client: GenerationClient, policy: Policy):
        serving = config.serving
        key = os.environ.get(serving.serve_api_key_env) or None
        problem = serving.key_problem(key)
        if problem:
            raise ConfigError([problem])
        self._reader = AnswerReader(config.agents, family_of(config.model))
        self._host = _agent_host(config)
        self._waiting, sessions = WaitingEpisodes(), Sessions(create=None, most=0, idle_s=0)
        try:
            self._listener = listen_at(serving.serve_host, serving.serve_port or 0)
        except OSError as error:
            where = f"--serve-host {serving.serve_host} --serve-port {serving.serve_port or 'a free one'}"
            raise ConfigError([f"{where}: the endpoint cannot listen there: {error.strerror or error}."]) from error
        host, port = self._listener.getsockname()[:2]
        self.url = http_url("127.0.0.1" if host == "0.0.0.0" else host, port)
        model = os.path.basename(os.path.normpath(config.checkpoint.hf_checkpoint or "policy"))
        answerer = Answerer(
            client,
            policy,
            tokenizer,
            self._reader,
            template_kwargs=config.data.chat_template_kwargs,
            max_turns=serving.agent_max_turns,
            sync_timeout_s=_SYNC_DEADLINES * config.rollout.rollout_request_timeout_s,
            vocab_size=config.model.vocab_size,
        )
        self._endpoint = Endpoint(
            answerer,
            sessions,
            EndpointOptions(
                model=model,
                max_context_tokens=context_tokens(config),
                key=key,
                most_requests=serving.serve_max_requests,
            ),
            lease=self._lease if self._host is None else None,
        )
        rule = config.reward.rm_type or config.reward.custom_rm_path or config.needs_reward_model

        def player() -> ServedPlayer:
            return ServedPlayer(
                sessions,
                self._waiting,
                self._host,
                url=self.url,
                model=model,
                timeout_s=serving.agent_timeout_s,
                needs_reward=not rule,
            )

        self.player, self.eval_player = player(), player()

    async def start(self) -> None:
        """Answer from now on. Raises PluginError for an agent that cannot be loaded."""
        if self._host is not None:
            await self._host.start()
        await self._endpoint.start(self._listener)
        logger.warning("agents play at %s", self.url)

    async def close(self) -> None:
        """Stop answering; end the agents and the parsers' process."""
        await self._endpoint.close()
        self._listener.close()
        await self._reader.close()
        if self._host is not None:
            await self._host.close()

    async def _lease(self, timeout_s: float) -> dict | None:
        session = await self._waiting.take(timeout_s)
        return self.player.describe(session) if session is not None else None


def _agent_host(config: RunConfig) -> CallsAgents | None:
    serving = config.serving
    if serving.agent_path is None:
        return None
    if serving.agent_python is None:
        return AgentHost(serving.agent_path)
    assert config.observability.run_dir, "a run that starts has a directory"
    log_path = os.path.join(config.observability.run_dir, "logs", "agents.log")
    return AgentProcess(serving.agent_python, serving.agent_path, log_path=log_path)
