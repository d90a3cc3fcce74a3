"""One answer of the policy for a session: plan the tokens, ask an engine, read what it said, record it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence

from slime_like.errors import EngineError, PluginError
from slime_like.records import ABORTED, COMPLETED, TRUNCATED
from slime_like.rollout.agents.answers import AnswerReader
from slime_like.rollout.agents.chat_turns import ChatTurns, TemplateRefusal
from slime_like.rollout.agents.tree import TurnPlan
from slime_like.rollout.data_source import ENGINE_RESERVED_TOKENS
from slime_like.rollout.generate import Generation, GenerationClient, sample_seed
from slime_like.rollout.policy import Policy
from slime_like.rollout.serve.sessions import Session, kind_of
from slime_like.rollout.serve.token_turns import TOKENS, TokenTurns, plan_ids, plan_with_ids
from slime_like.rollout.serve.turn_answer import TurnAnswer
from slime_like.rollout.serve.wire import ApiError, TurnRequest

#: Template arguments are a client's: this many of their renderers are kept.
_MOST_TURNS = 64


class Answerer:
    """Use it inside one event loop. max_turns: most answers of a session; all else that limits is the session's.
    vocab_size: rows of the model's embedding, which may be more than the tokenizer has ids: all may be sampled.
    """

    def __init__(
        self,
        client: GenerationClient,
        policy: Policy,
        tokenizer,
        reader: AnswerReader,
        *,
        template_kwargs: dict,
        max_turns: int,
        sync_timeout_s: float,
        vocab_size: int,
    ):
        self._client, self._policy, self._reader = client, policy, reader
        self.tokenizer = tokenizer
        self._kwargs, self._max_turns, self._sync_timeout_s = template_kwargs, max_turns, sync_timeout_s
        self._token_turns = TokenTurns(tokenizer)
        self._chat_turns = functools.lru_cache(maxsize=_MOST_TURNS)(self._new_turns)
        self._vocab_size = max(vocab_size, len(tokenizer))

    def turns(self, template_kwargs: dict) -> ChatTurns:
        """The chat template with the run's arguments and a client's over them."""
        return self._chat_turns(json.dumps(self._kwargs | template_kwargs, sort_keys=True))

    async def answer(self, session: Session, request: TurnRequest) -> TurnAnswer:
        """The answer, recorded in the session. Raises ApiError, and EngineError if no engine gives one."""
        if session.num_requests >= self._max_turns:
            raise ApiError(
                f"session {session.name} has had its {self._max_turns} answers (--agent-max-turns)", code="max_turns"
            )
        session.num_requests += 1
        number = session.num_requests
        kind = TOKENS if not request.messages else kind_of(request.template_kwargs)
        turns = self._token_turns if kind == TOKENS else self.turns(request.template_kwargs)
        tree = session.tree(kind, turns)
        plan = self._plan(session, request, turns)
        opening = await self._opening(request, plan)
        if opening:
            # Part of what is sent, so never trained: what is sampled after it has the policy's own log-probs.
            ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
            plan = dataclasses.replace(plan, ids=(*plan.ids, *ids))
        sampling = self._sampling(session, request, plan, number)
        generation = await self._generate(session, plan, sampling)
        text, finish = self._said(turns, generation, request.stop)
        message, malformed = await self._read(opening + text, request, number)
        if session.result.done():
            raise ApiError(f"session {session.name} was finished meanwhile", status=410, code="session_finished")
        session.num_malformed_calls += malformed
        node = tree.add(plan, generation, message)
        return TurnAnswer(
            prompt_ids=plan.ids,
            tokens=tuple(generation.tokens),
            logprobs=tuple(generation.logprobs),
            weight_version=generation.weight_version,
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else finish,
            conversation=node.messages,
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for ids that the model does not have: an engine would look them up all the same."""
        if max(ids, default=0) >= self._vocab_size:
            raise ApiError(f"{param}: id {max(ids)} is not in the vocabulary of {self._vocab_size}", param=param)

    def _new_turns(self, kwargs_json: str) -> ChatTurns:
        return ChatTurns(self.tokenizer, json.loads(kwargs_json))

    def _plan(self, session: Session, request: TurnRequest, turns: ChatTurns) -> TurnPlan:
        if request.ids is not None:
            self.check_ids(request.ids, "tokens")
        if not request.messages:
            assert request.ids is not None, "a request has messages or ids"
            return plan_ids(session.tree(TOKENS, turns), turns, request.ids)
        try:
            tree = session.tree(kind_of(request.template_kwargs), turns)
            plan = tree.plan(list(request.messages), list(request.tools) or None)
        except TemplateRefusal as error:
            raise ApiError(
                f"the model's chat template refuses the messages: {str(error)[:500]}",
                param="messages",
                code="chat_template_error",
            ) from error
        return plan if request.ids is None else plan_with_ids(turns, plan, request.ids)

    async def _opening(self, request: TurnRequest, plan: TurnPlan) -> str:
        """How the answer has to begin: as a call of one of the functions that tool_choice forces; else ""."""
        if not request.forced:
            return ""
        opening = await self._reader.opening(request.forced)
        if not opening:
            raise ApiError(
                "tool_choice: with this model's parser of tool calls none can be forced. Fix: auto, and ask for the"
                " call in words.",
                param="tool_choice",
                code="unsupported_value",
            )
        return after_thinking(plan.opening_text, opening)

    def _sampling(self, session: Session, request: TurnRequest, plan: TurnPlan, number: int) -> dict:
        """SGLang's sampling_params: the run's; of the client only what ends an answer sooner."""
        limits = session.sampling
        room = limits.max_context_tokens - len(plan.ids)
        if room <= ENGINE_RESERVED_TOKENS:
            raise ApiError(
                f"This model's maximum context length is {limits.max_context_tokens} tokens. However, your messages"
                f" resulted in {len(plan.ids)} tokens, which leaves no room for an answer.",
                param="messages",
                code="context_length_exceeded",
            )
        most = min(limits.max_response_tokens, room - ENGINE_RESERVED_TOKENS, request.max_tokens or room)
        params = limits.request(session.prompt, session.index)
        seed = f"{limits.seed}/turn {number}"
        return params | {
            "max_new_tokens": max(1, most),
            "stop": [*(limits.stop or []), *request.stop] or None,
            "stop_token_ids": [*(limits.stop_token_ids or []), *request.stop_token_ids] or None,
            "sampling_seed": sample_seed(seed, session.prompt.index, session.index),
        }

    async def _generate(self, session: Session, plan: TurnPlan, sampling: dict) -> Generation:
        """An engine's answer. One that our own weight sync ended is asked for again, with the same tokens."""
        while True:
            changes = self._policy.num_changes
            generation = await self._client.generate(plan.ids, sampling, session=session.name)
            if generation.status != ABORTED:
                break
            if not self._policy.explains_abort(changes):
                raise EngineError("the engine aborted the request")
            await self._policy.settled(self._sync_timeout_s)
        if not generation.tokens:
            raise EngineError(f"the engine gave no token (status {generation.status})")
        return generation

    def _said(self, turns: ChatTurns, generation: Generation, stops: Sequence[str]) -> tuple[str, str]:
        """(the text without what ended it, "stop" or "length")."""
        tokens = generation.tokens
        ended = generation.status == COMPLETED and tokens[-1] in turns.special_ids
        text = turns.decode(tokens[:-1] if ended else tokens)
        # OpenAI leaves a client's stop text out of the answer; it stays in the tokens, which were sampled.
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        return text, "length" if generation.status == TRUNCATED else "stop"

    async def _read(self, text: str, request: TurnRequest, number: int) -> tuple[dict, bool]:
        """(the message, whether it has what looks like a tool call and is none)."""
        if not request.messages:
            return {"role": "assistant", "content": text}, False
        try:
            answer = await self._reader.read(text, list(request.tools) or None)
        except PluginError as error:
            raise ApiError(str(error), param="tools") from error
        message = answer.message
        # Nine letters and digits, other ones in every turn: what the strictest templates ask for.
        calls = [
            {**call, "id": f"c{number % 100_000:05d}{place % 1000:03d}"}
            for place, call in enumerate(message.get("tool_calls") or [])
        ]
        return message | ({"tool_calls": calls} if calls else {}), answer.problem is not None


def after_thinking(prompt: str, opening: str) -> str:
    """The opening of an answer that does not think, behind the end of the thinking that the prompt has begun.

    Example: ("…assistant\\n<think>\\n", "<tool_call>") -> "\\n</think>\\n\\n<tool_call>"
    """
    return f"\n</think>\n\n{opening}" if prompt.rstrip().endswith("<think>") else opening


def with_reward(rows: Sequence, reward: float | None, metadata: dict) -> tuple:
    """The samples with the episode's reward and what is known of it."""
    return tuple(
        dataclasses.replace(sample, reward=reward, metadata={**sample.metadata, "episode": metadata}) for sample in rows
    )
