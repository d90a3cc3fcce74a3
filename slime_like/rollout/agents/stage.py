"""Everything that episodes need, made once for a run."""

from __future__ import annotations

from slime_like.config.families import family_of
from slime_like.config.run import RunConfig
from slime_like.rollout.agents.answers import AnswerReader
from slime_like.rollout.agents.chat_turns import ChatTurns
from slime_like.rollout.agents.environment import EnvironmentHost
from slime_like.rollout.agents.episode import EpisodePlayer
from slime_like.rollout.agents.registry import load_environment
from slime_like.rollout.generate import GenerationClient
from slime_like.rollout.policy import Policy


class AgentStage:
    """The players of training and evaluation over one host of environments. Raises PluginError."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer,
        client: GenerationClient,
        policy: Policy,
        *,
        eval_client: GenerationClient,
        eval_policy: Policy,
    ):
        agents = config.agents
        assert agents.env is not None, "made only with --env"
        self._host = EnvironmentHost(load_environment(agents.env), timeout_s=agents.env_timeout_s, name=agents.env)
        self._reader = AnswerReader(agents, family_of(config.model))
        turns = ChatTurns(tokenizer, config.data.chat_template_kwargs)
        timeout_s = config.rollout.rollout_request_timeout_s

        def player(client: GenerationClient, policy: Policy) -> EpisodePlayer:
            return EpisodePlayer(client, policy, turns, self._host, self._reader, agents, sync_timeout_s=10 * timeout_s)

        self.player, self.eval_player = player(client, policy), player(eval_client, eval_policy)

    async def close(self) -> None:
        """End the parsers' process and the environments' loop."""
        await self._reader.close()
        self._host.close()
