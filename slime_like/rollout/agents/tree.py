"""A conversation as an append-only tree of tokens: what was sampled is sent again as it was, never tokenized anew.

tree = ConversationTree(ChatTurns(tokenizer))
plan = tree.plan(messages, tools)                    # messages end with what the policy answers to
node = tree.add(plan, await client.generate(plan.ids, …), {"role": "assistant", "content": …})
tree.samples(prompt, sample_index)                   # checked rows, and why others are left out
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from slime_like.records import Prompt, Sample
from slime_like.rollout.agents.chat_turns import ChatTurns, Following, TemplateRefusal
from slime_like.rollout.agents.invariants import Violation, broken_path, broken_rows
from slime_like.rollout.agents.turn_nodes import TurnNode, TurnPlan
from slime_like.rollout.generate import Generation
from slime_like.rollout.sample_builder import SampleBuilder


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRows:
    """The samples of a tree in the order of their leaves, and what was left out."""

    samples: tuple[Sample, ...]
    violations: tuple[Violation, ...]
    num_roots: int
    num_trimmed: int  # sampled tokens that no row trains, as declared by TurnPlan.num_trimmed


class ConversationTree:
    """Grows by `plan` and `add`. Refuses no conversation: what fits nowhere begins a new root from a full render."""

    def __init__(self, turns: ChatTurns):
        self._turns = turns
        self.nodes: list[TurnNode] = []

    def plan(self, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> TurnPlan:
        """What to send for the answer to these messages. Raises TemplateRefusal if they cannot be rendered at all."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("a conversation to be answered must end with a message that is not the assistant's")
        key = self._turns.key(tools)
        spelled = tuple(map(_spelling, messages))
        parent = self._deepest(messages, spelled, key)
        if parent is not None:
            new = messages[len(parent.messages) :]
            try:
                following = self._turns.after_answer(new, tools)
            except TemplateRefusal:
                parent = None  # it cannot say what follows an answer, but perhaps it can render the whole
            else:
                return self._going_on(parent, following, new, tools, spelled)
        text, ids = self._turns.whole(messages, tools)
        return TurnPlan(tuple(ids), tuple(messages), key, tuple(tools or ()), spelled, opening_text=text)

    def add(self, plan: TurnPlan, generation: Generation, message: dict) -> TurnNode:
        """Record an answer. message: the answer as it stands in the conversation."""
        node = TurnNode(plan, generation, message, len(self.nodes), (*plan.spelled, _spelling(message)))
        self.nodes.append(node)
        return node

    def leaves(self) -> list[TurnNode]:
        """Answers that nothing goes on from, in the order in which they came."""
        parents = {node.plan.parent.index for node in self.nodes if node.plan.parent is not None}
        return [node for node in self.nodes if node.index not in parents]

    def samples(self, prompt: Prompt, sample_index: int) -> TreeRows:
        """A row a leaf, each sampled token trained in the first row that has it. A leaf that breaks an invariant is
        left out, and what it shares with others is theirs.
        """
        violations, good = [], []
        for leaf in self.leaves():
            broken = broken_path(leaf.path, self._turns)
            violations += [broken] if broken else []
            good += [] if broken else [leaf]
        trained: dict[int, int] = {}  # answer -> how many of its tokens a row trains
        rows = [self._row(leaf, trained, prompt, sample_index, segment) for segment, leaf in enumerate(good)]
        late = broken_rows(rows, [leaf.path for leaf in good])
        if late:
            return TreeRows(samples=(), violations=(*violations, late), num_roots=0, num_trimmed=0)
        kept = {node.index: len(node.generation.tokens) for leaf in good for node in leaf.path}
        return TreeRows(
            samples=tuple(rows),
            violations=tuple(violations),
            num_roots=sum(node.plan.parent is None for node in self.nodes),
            num_trimmed=sum(kept.values()) - sum(trained.values()),
        )

    def _deepest(self, messages: Sequence[dict], spelled: tuple[str, ...], key: str) -> TurnNode | None:
        """The longest conversation of ours that these messages begin with and only add observations to."""
        best = None
        for node in self.nodes:
            length = len(node.spelled)
            if (
                node.is_whole
                and node.plan.key == key
                and (len(best.spelled) if best else 0) < length < len(messages)
                and node.spelled == spelled[:length]
                and all(message["role"] != "assistant" for message in messages[length:])
            ):
                best = node
        return best

    def _going_on(
        self,
        parent: TurnNode,
        following: Following,
        new: Sequence[dict],
        tools: Sequence[dict] | None,
        spelled: tuple[str, ...],
    ) -> TurnPlan:
        ids, special, num_trimmed = list(following.ids), self._turns.special_ids, 0
        last = parent.generation.tokens[-1]
        first = next((place for place, token in enumerate(ids) if token in special), None)
        if first is not None and ids[first] == last:
            ids = ids[first + 1 :]  # the policy has ended its turn as the template would
        elif last in special:
            num_trimmed = 1
        return TurnPlan(
            ids=(*parent.ids[: len(parent.ids) - num_trimmed], *ids),
            messages=(*parent.messages, *new),  # on a match the stored message stands, however the caller spelled it
            key=parent.plan.key,
            tools=tuple(tools or ()),
            spelled=spelled,
            parent=parent,
            num_trimmed=num_trimmed,
            opening_text=following.text,
        )

    def _row(
        self, leaf: TurnNode, trained: dict[int, int], prompt: Prompt, sample_index: int, segment_index: int
    ) -> Sample:
        path = leaf.path
        root = path[0].plan
        opening = dataclasses.replace(prompt, tokens=np.array(root.ids, dtype=np.int32), text=root.opening_text)
        builder = SampleBuilder(opening, sample_index, segment_index=segment_index)
        for node, following in zip(path, [*path[1:], None], strict=True):
            generation, cut = node.generation, following.plan.num_trimmed if following else 0
            length = len(generation.tokens) - cut
            done = min(trained.get(node.index, 0), length)
            builder.observe(generation.tokens[:done])
            builder.generated(
                dataclasses.replace(
                    generation, tokens=generation.tokens[done:length], logprobs=generation.logprobs[done:length]
                )
            )
            trained[node.index] = max(length, trained.get(node.index, 0))
            if following is not None:
                builder.observe(following.plan.ids[len(node.plan.ids) + length :])
        return builder.finish()


def _spelling(message: dict) -> str:
    """A message as text that is equal for what means the same: no content and "", arguments as JSON or as an object.

    Thinking is no part of it: clients leave it out of what they send again.
    """
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass  # no JSON: compared as it stands
        calls.append([function.get("name"), arguments])
    fields = {"role": message["role"], "content": message.get("content") or "", "calls": calls}
    if message["role"] != "assistant":
        fields |= {name: message.get(name) for name in ("name", "tool_call_id")}
    return json.dumps(fields, sort_keys=True)
