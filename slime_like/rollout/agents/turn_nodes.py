"""What a conversation tree is made of: what was sent for an answer, and what came back."""

from __future__ import annotations

import dataclasses

from slime_like.records import COMPLETED
from slime_like.rollout.generate import Generation


@dataclasses.dataclass(frozen=True, eq=False)
class TurnPlan:
    """What to send for one answer. ids: all of it; parent: the answer that it goes on from, None for a new root.

    num_trimmed: sampled tokens at the parent's end that are not sent: 1 where it stopped with another special token
    than the one that the template goes on with (GLM ends an answer with the next message's role), else 0.
    """

    ids: tuple[int, ...]
    messages: tuple[dict, ...]
    key: str
    tools: tuple[dict, ...]
    spelled: tuple[str, ...]  # the messages, each as what it means
    parent: TurnNode | None = None
    num_trimmed: int = 0
    opening_text: str = ""  # a root's render, or the text that follows the parent


@dataclasses.dataclass(frozen=True, eq=False)
class TurnNode:
    """One answer: the plan that was sent, what came back, and the message that it is in the conversation."""

    plan: TurnPlan
    generation: Generation
    message: dict
    index: int
    spelled: tuple[str, ...]  # the conversation up to and with this answer, each message as what it means

    @property
    def ids(self) -> tuple[int, ...]:
        """Sent and sampled."""
        return (*self.plan.ids, *self.generation.tokens)

    @property
    def messages(self) -> tuple[dict, ...]:
        """The conversation up to and with this answer."""
        return (*self.plan.messages, self.message)

    @property
    def path(self) -> list[TurnNode]:
        """From the root to this answer."""
        path = [self]
        while path[-1].plan.parent is not None:
            path.append(path[-1].plan.parent)
        return path[::-1]

    @property
    def is_whole(self) -> bool:
        """Whether the policy ended it; one that ended by length or abort is never gone on from."""
        return self.generation.status == COMPLETED
