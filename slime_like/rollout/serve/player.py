"""Episodes of a run that foreign agents play: opened for a prompt, played over HTTP, closed into samples."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Sequence

from slime_like.records import Prompt, Sample
from slime_like.rollout.agents.episode_metrics import EpisodeTally
from slime_like.rollout.generate import Sampling
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.rollout.serve.agent_host import AgentFailure, CallsAgents
from slime_like.rollout.serve.answering import with_reward
from slime_like.rollout.serve.sessions import EpisodeResult, Session, Sessions

logger = logging.getLogger(__name__)


class WaitingEpisodes:
    """Sessions that wait for an agent from outside to take them; used inside one event loop."""

    def __init__(self) -> None:
        self._sessions: collections.deque[Session] = collections.deque()
        self._arrived = asyncio.Event()

    def add(self, session: Session) -> None:
        """Let one be taken."""
        self._sessions.append(session)
        self._arrived.set()

    def drop(self, session: Session) -> None:
        """Nobody can take it any more."""
        if session in self._sessions:
            self._sessions.remove(session)

    async def take(self, timeout_s: float) -> Session | None:
        """The oldest; None if none comes in time."""
        end = time.monotonic() + timeout_s
        while not self._sessions:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                return None
        return self._sessions.popleft()


class ServedPlayer:
    """Plays an episode a sample. host: the run's own agent; None: whoever takes it from `waiting`.

    needs_reward: no rule of the run gives one, so the agent must. url: where the endpoint is reached.
    """

    def __init__(
        self,
        sessions: Sessions,
        waiting: WaitingEpisodes,
        host: CallsAgents | None,
        *,
        url: str,
        model: str,
        timeout_s: float,
        needs_reward: bool,
    ):
        self._sessions, self._waiting, self._host = sessions, waiting, host
        self._url, self._model = url, model
        self._timeout_s, self._needs_reward = timeout_s, needs_reward
        self.tally = EpisodeTally()

    async def play(self, prompt: Prompt, index: int, sampling: Sampling) -> Sequence[Sample]:
        """The episode's samples: a row for each conversation that was not gone on from. Never raises for an agent's
        faults: they are a failed sample.
        """
        session = self._sessions.open(prompt, index, sampling)
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._result(session)
        except (AgentFailure, TimeoutError) as error:
            late = f"the agent did not finish within {self._timeout_s:g} s (--agent-timeout-s)"
            failure = error if isinstance(error, AgentFailure) else AgentFailure(late, "timeout")
            return self._failed(session, failure.kind, str(failure))
        finally:
            self._waiting.drop(session)
            self._sessions.close(session)
        self.tally.count("seconds", time.monotonic() - begin)
        return self._samples(session, result)

    def describe(self, session: Session) -> dict:
        """What an agent needs to play: base_url, prompt, request_kwargs, metadata; and the session's name."""
        prompt, limits = session.prompt, session.sampling
        request_kwargs = {
            "model": self._model,
            "temperature": limits.temperature,
            "top_p": limits.top_p,
            "max_completion_tokens": limits.max_response_tokens,
        }
        return {
            "session_id": session.name,
            "base_url": f"{self._url}/sessions/{session.name}/v1",
            "prompt": prompt.messages or [{"role": "user", "content": prompt.text}],
            "request_kwargs": request_kwargs,
            "metadata": {**prompt.metadata, "label": prompt.label, "session_id": session.name},
        }

    async def _result(self, session: Session) -> EpisodeResult:
        if self._host is None:
            self._waiting.add(session)
            return await asyncio.shield(session.result)
        view = self.describe(session)
        value = await self._host.call(view["base_url"], view["prompt"], view["request_kwargs"], view["metadata"])
        if value is None and session.result.done():
            return session.result.result()  # it has posted its result
        try:
            result = EpisodeResult.read(value)
        except ValueError as error:
            raise AgentFailure(f"--agent-path {self._host.name} gave what is no result: {error}") from None
        if not session.result.done():
            session.finish(result)
        return result

    def _failed(self, session: Session, kind: str, error: str) -> Sequence[Sample]:
        self.tally.failed(kind)
        where = f"prompt {session.prompt.index}, sample {session.index}"
        logger.warning("%s: the episode failed after %d turns: %s", where, session.num_turns, error)
        return [SampleBuilder(session.prompt, session.index).fail(error, of_user=kind != "violation")]

    def _samples(self, session: Session, result: EpisodeResult) -> Sequence[Sample]:
        if result.reward is None and self._needs_reward:
            why = "the agent gave no reward, and there is no --rm-type, --custom-rm-path or --reward-load"
            return self._failed(session, "error", why)
        if not session.num_turns:
            return self._failed(session, "error", "the agent finished without one answer of the policy")
        rows = session.rows()
        tally = self.tally
        for violation in rows.violations:
            logger.warning("prompt %d: a row is left out: %s", session.prompt.index, violation)
            tally.count(f"violations/{violation.name}")
        tally.count("violations", len(rows.violations))
        tally.count("malformed_calls", session.num_malformed_calls)
        if not rows.samples:
            return self._failed(session, "violation", str(rows.violations[0]))
        ending = "length" if rows.truncated else "done"
        tally.ended(ending, turns=session.num_turns, rows=len(rows.samples), drifted=rows.drifted)
        tally.count("forks", rows.num_roots - 1)
        tally.count("trimmed_tokens", rows.num_trimmed)
        report = {"ending": ending, "turns": session.num_turns, **result.metadata}
        return with_reward(rows.samples, result.reward, report)
