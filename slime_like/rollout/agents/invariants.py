"""What must be true of every row that a conversation tree gives; whatever is not is never trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slime_like.records import Sample
from slime_like.rollout.agents.chat_turns import ChatTurns, TemplateRefusal, without_thinking
from slime_like.rollout.agents.turn_nodes import TurnNode

#: Invariant -> what it says.
INVARIANTS = {
    "prefix": "what is sent begins with all that was sent and sampled before, but for one stop token where declared",
    "lengths": "ids and log-probs are equally many and finite, and an answer has at least one token",
    "provenance": "a token is trained if and only if it was sampled, once among all rows, with its version",
    "root_key": "tools and template arguments are those of the root",
    "ended": "an answer that ended by length or abort is never gone on from",
    "stored": "the conversation holds the messages that were stored",
    "canonical": "outside the assistant's text the template renders the whole conversation to what was sent",
    "member": "all rows of an episode have its sample index, and are numbered",
}


@dataclasses.dataclass(frozen=True)
class Violation:
    """A broken invariant: its name in INVARIANTS, and where."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"invariant {self.name} ({INVARIANTS[self.name]}): {self.what}"


def broken_path(path: Sequence[TurnNode], turns: ChatTurns) -> Violation | None:
    """The first invariant that a conversation breaks, from its root to a leaf; None if all hold."""
    for node in path:
        broken = _broken_node(node, path[0].plan.key)
        if broken:
            return broken
    return _not_canonical(path, turns)


def broken_rows(rows: Sequence[Sample], paths: Sequence[Sequence[TurnNode]]) -> Violation | None:
    """The first invariant that rows break, each against its path, counted anew from the answers; None if all hold."""
    trained: set[tuple[int, int]] = set()
    for number, (row, path) in enumerate(zip(rows, paths, strict=True)):
        if row.segment_index != number or row.sample_index != rows[0].sample_index:
            return Violation("member", f"row {number} is sample {row.sample_index}, segment {row.segment_index}")
        if tuple(row.tokens.tolist()) != path[-1].ids:
            return Violation("prefix", f"row {number} is not what was sent and sampled last")
        ours = np.full(len(row.tokens), -1)  # version by position, as the answers say
        logprobs = np.zeros(len(row.tokens), dtype=np.float32)
        for place, node in enumerate(path):
            start = len(node.plan.ids)
            cut = path[place + 1].plan.num_trimmed if place + 1 < len(path) else 0
            for offset in range(len(node.generation.tokens) - cut):
                if (node.index, offset) not in trained:
                    trained.add((node.index, offset))
                    ours[start + offset] = node.generation.weight_version
                    logprobs[start + offset] = node.generation.logprobs[offset]
        fits = (
            np.array_equal(row.loss_mask != 0, ours != -1)
            and np.array_equal(row.weight_versions, ours)
            and np.array_equal(row.engine_logprobs, logprobs)
        )
        if not fits:
            return Violation("provenance", f"row {number} trains {int(row.loss_mask.sum())} tokens, not those sampled")
    return None


def drifted(path: Sequence[TurnNode], turns: ChatTurns) -> bool:
    """Whether tokenizing the conversation anew would give other ids than those that were sent for the last answer."""
    last = path[-1].plan
    try:
        return tuple(turns.whole(last.messages, last.tools)[1]) != last.ids
    except TemplateRefusal:
        return True


def _broken_node(node: TurnNode, root_key: str) -> Violation | None:
    generation, parent, where = node.generation, node.plan.parent, f"answer {node.index}"
    if not generation.tokens or len(generation.tokens) != len(generation.logprobs):
        return Violation("lengths", f"{where}: {len(generation.tokens)} tokens, {len(generation.logprobs)} log-probs")
    if not np.isfinite(generation.logprobs).all() or generation.weight_version < 0:
        return Violation(
            "lengths", f"{where}: log-probs {generation.logprobs[:4]}, version {generation.weight_version}"
        )
    if node.plan.key != root_key:
        return Violation("root_key", where)
    if parent is None:
        return None
    if not parent.is_whole:
        return Violation("ended", f"{where} goes on from answer {parent.index}, which is {parent.generation.status}")
    kept = parent.ids[: len(parent.ids) - node.plan.num_trimmed]
    if not 0 <= node.plan.num_trimmed <= 1 or node.plan.ids[: len(kept)] != kept:
        return Violation("prefix", f"{where} was not sent all of answer {parent.index}")
    if node.plan.messages[: len(parent.messages)] != parent.messages:
        return Violation("stored", f"{where} has other messages than answer {parent.index}")
    return None


def _not_canonical(path: Sequence[TurnNode], turns: ChatTurns) -> Violation | None:
    """Compare the template's text between the answers of the whole conversation with what was sent, piece by piece."""
    last = path[-1].plan
    try:
        whole = turns.around_answers(last.messages, last.tools)
        opening = turns.around_answers(path[0].plan.messages, path[0].plan.tools)
    except TemplateRefusal as error:
        return Violation("canonical", f"the template cannot render the conversation: {error}")
    sent = [*opening, *(node.plan.opening_text for node in path[1:])]
    if len(sent) != len(whole):
        return Violation("canonical", f"{len(sent)} pieces were sent, the whole conversation has {len(whole)}")
    for place, (ours, canonical) in enumerate(zip(sent, whole, strict=True)):
        if without_thinking(ours) != without_thinking(canonical):
            return Violation(
                "canonical", f"before answer {place} {ours[-80:]!r} was sent; the whole has {canonical[-80:]!r}"
            )
    return None
