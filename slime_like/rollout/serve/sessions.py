"""Episodes that somebody else plays: each has its conversations, as trees of tokens, until it is finished."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from slime_like.records import TRUNCATED, Prompt, Sample
from slime_like.rollout.agents.chat_turns import ChatTurns
from slime_like.rollout.agents.invariants import Violation, drifted
from slime_like.rollout.agents.tree import ConversationTree, TurnNode
from slime_like.rollout.generate import Sampling
from slime_like.rollout.serve.token_turns import TokenTurns
from slime_like.rollout.serve.wire import ApiError

#: What may stand in a path.
_NAME = re.compile(r"[A-Za-z0-9_.:~-]{1,128}")
_RETRY_S = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """What ended an episode. reward: None leaves it to the run's own rule."""

    reward: float | None = None
    metadata: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, value: Any) -> EpisodeResult:
        """From {"reward": number or null, "metadata": object}, or None. Raises ValueError."""
        if value is None:
            return cls()
        if not isinstance(value, dict) or not value.keys() <= {"reward", "metadata"}:
            raise ValueError(f"must be nothing, or an object of reward and metadata, not {value!r:.120}")
        reward, metadata = value.get("reward"), value.get("metadata") or {}
        if reward is not None and (
            isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward)
        ):
            raise ValueError(f"reward: must be a finite number, not {reward!r:.80}")
        if not isinstance(metadata, dict):
            raise ValueError(f"metadata: must be an object, not {metadata!r:.80}")
        return cls(reward=None if reward is None else float(reward), metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRows:
    """The samples of a session in the order of their last answers, numbered; and what is left out."""

    samples: tuple[Sample, ...]
    violations: tuple[Violation, ...]
    num_roots: int
    num_trimmed: int
    drifted: bool
    truncated: bool  # an answer reached its limit, and nothing goes on from it


class Session:
    """One episode. sampling: the run's, whatever the client asks for."""

    def __init__(self, name: str, prompt: Prompt, index: int, sampling: Sampling):
        self.name, self.prompt, self.index, self.sampling = name, prompt, index, sampling
        self.result: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        self.num_requests = 0
        self.num_malformed_calls = 0
        self.last_used_s = time.monotonic()
        #: messages of what /v1/responses answered, by the response's id
        self.responses: dict[str, tuple[dict, ...]] = {}
        self._trees: dict[str, tuple[ConversationTree, ChatTurns]] = {}

    @property
    def num_turns(self) -> int:
        """Answers that were recorded."""
        return sum(len(tree.nodes) for tree, _ in self._trees.values())

    def finish(self, result: EpisodeResult) -> None:
        """End it; requests are refused from now on. Raises ApiError if it has ended."""
        if self.result.done():
            raise ApiError(f"session {self.name} is finished already", status=410, code="session_finished")
        self.result.set_result(result)

    def tree(self, kind: str, turns: ChatTurns) -> ConversationTree:
        """The tree of all requests of one kind: with these template arguments, or of bare tokens."""
        if kind not in self._trees:
            self._trees[kind] = (ConversationTree(turns), turns)
        return self._trees[kind][0]

    def rows(self) -> SessionRows:
        """All that can be trained on, checked."""
        samples: list[Sample] = []
        violations: list[Violation] = []
        leaves: list[TurnNode] = []
        num_roots = num_trimmed = 0
        any_drift = False
        for tree, turns in self._trees.values():
            rows = tree.samples(self.prompt, self.index)
            samples += rows.samples
            violations += rows.violations
            num_roots += rows.num_roots
            num_trimmed += rows.num_trimmed
            leaves += tree.leaves()
            if not isinstance(turns, TokenTurns):  # those have no template to compare with
                any_drift = any_drift or any(drifted(leaf.path, turns) for leaf in tree.leaves())
        return SessionRows(
            samples=tuple(dataclasses.replace(sample, segment_index=number) for number, sample in enumerate(samples)),
            violations=tuple(violations),
            num_roots=num_roots,
            num_trimmed=num_trimmed,
            drifted=any_drift,
            truncated=any(leaf.generation.status == TRUNCATED for leaf in leaves),
        )


class Sessions:
    """All that are open. create: makes one for a name that a client chose, None: only `open` makes them.

    most: how many are open at a time; idle_s: after how long without a request one makes room for others.
    """

    def __init__(self, *, create: Callable[[str], Session] | None, most: int, idle_s: float):
        self._create, self._most, self._idle_s = create, most, idle_s
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def open(self, prompt: Prompt, index: int, sampling: Sampling) -> Session:
        """A new one under a name that cannot be guessed: it is the right to use it, too."""
        session = Session(uuid.uuid4().hex, prompt, index, sampling)
        self._open[session.name] = session
        return session

    def get(self, name: str) -> Session:
        """The session, made if that is allowed. Raises ApiError: 404 for an unknown one, 410 for a finished one."""
        session = self._open.get(name)
        if session is None:
            session = self._new(name)
        if session.result.done():
            raise ApiError(f"session {name} is finished", status=410, code="session_finished")
        session.last_used_s = time.monotonic()
        return session

    def close(self, session: Session) -> None:
        """Forget it, and all that it recorded."""
        self._open.pop(session.name, None)

    def _new(self, name: str) -> Session:
        if self._create is None:
            raise ApiError(f"no session {name[:80]!r} is open", status=404, code="session_not_found")
        if not _NAME.fullmatch(name):
            raise ApiError(f"{name[:80]!r} is no name of a session: 1 to 128 of A-Z a-z 0-9 _ . : ~ -")
        if len(self._open) >= self._most:
            self._drop_idle()
        if len(self._open) >= self._most:
            raise ApiError(
                f"{self._most} sessions are open; finish one with POST /sessions/NAME/finish",
                status=429,
                kind="rate_limit_error",
                code="too_many_sessions",
                retry_after_s=_RETRY_S,
            )
        session = self._open[name] = self._create(name)
        return session

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for session in [one for one in self._open.values() if one.last_used_s < oldest]:
            self.close(session)


def kind_of(kwargs: dict) -> str:
    """The name of the tree for template arguments."""
    return json.dumps(kwargs, sort_keys=True)
