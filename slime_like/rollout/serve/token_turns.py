"""Turns of clients that render by themselves: they send ids, and what they add to a conversation is theirs to say."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.rollout.agents.chat_turns import ChatTurns
from slime_like.rollout.agents.tree import ConversationTree, TurnNode, TurnPlan

#: The tree of requests without messages.
TOKENS = "tokens"


class TokenTurns(ChatTurns):
    """Instead of a chat template: the text of the ids is the message, and rendering one gives its text."""

    def key(self, tools: Sequence[dict] | None) -> str:
        """One for all: tools are part of the ids."""
        return TOKENS

    def around_answers(self, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> list[str]:
        """The messages' own texts before, between and behind the answers."""
        pieces = [""]
        for message in messages:
            if message["role"] == "assistant":
                pieces.append("")
            else:
                pieces[-1] += message["content"]
        return pieces


def plan_ids(tree: ConversationTree, turns: ChatTurns, ids: tuple[int, ...]) -> TurnPlan:
    """What to send where the client said it: a child of the longest answer that the ids begin with, else a new root."""
    parent = _longest(tree, ids)
    text = turns.decode(ids[len(parent.ids) :] if parent else ids)
    new = {"role": "user", "content": text}
    messages = (*parent.messages, new) if parent else (new,)
    return TurnPlan(ids, messages, turns.key(None), (), (), parent=parent, opening_text=text)


def plan_with_ids(turns: ChatTurns, plan: TurnPlan, ids: tuple[int, ...]) -> TurnPlan:
    """A chat turn's plan with the client's ids in place of ours; on its own root if they are not what its parent's
    tokens go on with.
    """
    if ids == plan.ids:
        return plan
    parent = plan.parent
    if parent is None or ids[: len(parent.ids)] != parent.ids or len(ids) == len(parent.ids):
        return _as_root(plan, turns, ids)
    last = parent.generation.tokens[-1]
    ended = (last,) if last in turns.special_ids else ()
    text = turns.decode((*ended, *ids[len(parent.ids) :]))
    return TurnPlan(ids, plan.messages, plan.key, plan.tools, plan.spelled, parent=parent, opening_text=text)


def _as_root(plan: TurnPlan, turns: ChatTurns, ids: tuple[int, ...]) -> TurnPlan:
    return TurnPlan(ids, plan.messages, plan.key, plan.tools, plan.spelled, opening_text=turns.decode(ids))


def _longest(tree: ConversationTree, ids: tuple[int, ...]) -> TurnNode | None:
    fitting = [
        node for node in tree.nodes if node.is_whole and len(node.ids) < len(ids) and ids[: len(node.ids)] == node.ids
    ]
    return max(fitting, key=lambda node: len(node.ids), default=None)
