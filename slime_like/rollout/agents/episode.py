"""Plays episodes: the environment speaks, the policy answers, until one of them, or a limit, ends it."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence

from slime_like.config.agents import AgentConfig
from slime_like.errors import EngineError
from slime_like.records import ABORTED, COMPLETED, TRUNCATED, Prompt, Sample
from slime_like.rollout.agents.answers import AnswerReader
from slime_like.rollout.agents.chat_turns import ChatTurns, TemplateRefusal
from slime_like.rollout.agents.environment import EnvironmentFailure, EnvironmentHost, HostedEnvironment, Task, Turn
from slime_like.rollout.agents.episode_metrics import EpisodeTally
from slime_like.rollout.agents.invariants import drifted
from slime_like.rollout.agents.tree import ConversationTree
from slime_like.rollout.agents.turn_nodes import TurnNode, TurnPlan
from slime_like.rollout.data_source import ENGINE_RESERVED_TOKENS
from slime_like.rollout.generate import Generation, GenerationClient, Sampling, sample_seed
from slime_like.rollout.policy import Policy
from slime_like.rollout.sample_builder import SampleBuilder

logger = logging.getLogger(__name__)

#: How an episode ended -> the status of its samples. An aborted one is played again by the caller.
ENDINGS = {
    "done": COMPLETED,  # the environment says so
    "env_truncated": TRUNCATED,  # the environment cut it off
    "max_turns": TRUNCATED,  # --max-turns
    "length": TRUNCATED,  # an answer reached --rollout-max-response-len
    "context": TRUNCATED,  # the next answer would have no room in --rollout-max-context-len
    "aborted": ABORTED,  # the engine ended a request, and none of our weight syncs explains it
}


@dataclasses.dataclass
class _Episode:
    """One that is being played."""

    prompt: Prompt
    index: int
    sampling: Sampling
    session: str
    tree: ConversationTree
    rewards: list[float] = dataclasses.field(default_factory=list)
    infos: list[dict] = dataclasses.field(default_factory=list)

    @property
    def where(self) -> str:
        return f"prompt {self.prompt.index}, sample {self.index}"


class EpisodePlayer:
    """One for training and one for evaluation; use it inside one event loop.

    `play` raises EngineError as a request does; all that an environment does wrong is a failed sample.
    """

    def __init__(
        self,
        client: GenerationClient,
        policy: Policy,
        turns: ChatTurns,
        host: EnvironmentHost,
        reader: AnswerReader,
        config: AgentConfig,
        *,
        sync_timeout_s: float,
    ):
        self._client, self._policy, self._turns = client, policy, turns
        self._host, self._reader, self._config = host, reader, config
        self._sync_timeout_s = sync_timeout_s
        self.tally = EpisodeTally()

    async def play(self, prompt: Prompt, index: int, sampling: Sampling) -> Sequence[Sample]:
        """An episode's samples: a row each time that its history was replaced, one else. All have its reward."""
        session = f"{sampling.seed}/{prompt.index}/{index}/{uuid.uuid4().hex[:8]}"
        episode = _Episode(prompt, index, sampling, session, ConversationTree(self._turns))
        environment = self._host.open(episode.where)
        begin = time.monotonic()
        try:
            ending = await self._until_ended(episode, environment)
        except (EnvironmentFailure, TemplateRefusal) as error:
            self.tally.failed(error.kind if isinstance(error, EnvironmentFailure) else "template")
            logger.warning("%s: the episode failed: %s", episode.where, error)
            return [SampleBuilder(prompt, index).fail(f"{type(error).__name__}: {error}", of_user=True)]
        finally:
            await self._close(environment)
        self.tally.count("seconds", time.monotonic() - begin)
        return self._samples(episode, ending)

    async def _until_ended(self, episode: _Episode, environment: HostedEnvironment) -> str:
        """The name of its end, in ENDINGS."""
        prompt = episode.prompt
        task = Task(messages=list(prompt.messages or []), label=prompt.label, metadata=prompt.metadata)
        # All samples of a prompt begin alike: they are compared.
        seed = task.metadata.get("seed", sample_seed(f"{episode.sampling.seed}/env", prompt.index, 0))
        turn = await environment.reset(seed, task)
        messages, tools = list(turn.messages), turn.tools
        if tools and not self._turns.takes_tools:
            raise TemplateRefusal("the environment offers tools, and the chat template has no place for them")
        for _ in range(self._config.max_turns):
            plan = episode.tree.plan(messages, tools)
            if episode.sampling.max_context_tokens - len(plan.ids) <= ENGINE_RESERVED_TOKENS:
                return "context"
            generation = await self._generate(episode, plan)
            answer = await self._reader.read(self._said(generation), tools)
            node = episode.tree.add(plan, generation, answer.message)
            if generation.status != COMPLETED:
                return "length" if generation.status == TRUNCATED else "aborted"
            turn = self._correction(answer.problem) if answer.problem else await environment.step(answer.message)
            episode.rewards.append(float(turn.reward))
            episode.infos += [turn.info] if turn.info else []
            if turn.done or turn.truncated:
                return "done" if turn.done else "env_truncated"
            messages = list(turn.messages) if turn.replaces_history else [*node.messages, *turn.messages]
            tools = tools if turn.tools is None else turn.tools
            if not turn.messages or messages[-1]["role"] == "assistant":
                raise EnvironmentFailure(
                    f"environment {self._host.name}, step for {episode.where}: it is not done, and says nothing"
                )
        return "max_turns"

    async def _generate(self, episode: _Episode, plan: TurnPlan) -> Generation:
        """The policy's answer. One that our own weight sync ended is asked for again, with the same tokens."""
        sampling, number = episode.sampling, len(episode.tree.nodes)
        room = sampling.max_context_tokens - len(plan.ids)
        request = sampling.request(episode.prompt, episode.index) | {
            "max_new_tokens": min(sampling.max_response_tokens, room),
            "sampling_seed": sample_seed(f"{sampling.seed}/turn {number}", episode.prompt.index, episode.index),
        }
        while True:
            changes = self._policy.num_changes
            generation = await self._client.generate(plan.ids, request, session=episode.session)
            if generation.status != ABORTED:
                break
            if not self._policy.explains_abort(changes):
                return generation
            self.tally.count("resubmitted_turns")
            await self._policy.settled(self._sync_timeout_s)
        if not generation.tokens:
            raise EngineError(f"{episode.where}: the engine gave no token (status {generation.status})")
        return generation

    def _said(self, generation: Generation) -> str:
        """The text of what was sampled, without the special token that ended it, with all others."""
        ends = generation.status == COMPLETED and generation.tokens and generation.tokens[-1] in self._turns.special_ids
        return self._turns.decode(generation.tokens[:-1] if ends else generation.tokens)

    def _correction(self, problem: str) -> Turn:
        """What the policy is told of a malformed tool call; the environment does not hear of it."""
        self.tally.count("malformed_calls")
        return Turn(messages=[{"role": "user", "content": f"Your tool call could not be read: {problem}."}])

    async def _close(self, environment: HostedEnvironment) -> None:
        try:
            await environment.close()
        except EnvironmentFailure as error:
            self.tally.count("env_close_failures")
            logger.warning("%s", error)

    def _samples(self, episode: _Episode, ending: str) -> Sequence[Sample]:
        """The rows; a failed sample if none keeps the invariants."""
        tally, tree = self.tally, episode.tree
        if not tree.nodes:
            tally.failed("context")
            error = f"the environment's opening leaves no room in {episode.sampling.max_context_tokens} tokens"
            return [SampleBuilder(episode.prompt, episode.index).fail(f"{error} (--rollout-max-context-len)")]
        if ending == "aborted":
            return [SampleBuilder(episode.prompt, episode.index).finish(ABORTED)]
        rows = tree.samples(episode.prompt, episode.index)
        for violation in rows.violations:
            logger.warning("%s: a row is left out: %s", episode.where, violation)
            tally.count(f"violations/{violation.name}")
        tally.count("violations", len(rows.violations))
        if not rows.samples:
            tally.failed("violation")
            return [SampleBuilder(episode.prompt, episode.index).fail(str(rows.violations[0]))]
        tally.ended(ending, turns=len(tree.nodes), rows=len(rows.samples), drifted=self._has_drifted(tree.leaves()))
        tally.count("forks", rows.num_roots - 1)
        tally.count("trimmed_tokens", rows.num_trimmed)
        report = {"ending": ending, "turns": len(tree.nodes), "rewards": episode.rewards, "infos": episode.infos}
        return [
            dataclasses.replace(
                sample,
                reward=float(sum(episode.rewards)),
                status=ENDINGS[ending],
                metadata={**sample.metadata, "episode": report},
            )
            for sample in rows.samples
        ]

    def _has_drifted(self, leaves: Sequence[TurnNode]) -> bool:
        return any(drifted(leaf.path, self._turns) for leaf in leaves)
