"""What became of every prompt: drawn -> in flight -> ready -> taken -> trained, or dropped, and why.

The one memory of a data position.
Prompts are known by their position in the stream of prompts. Plain state, no clock and no network, so that resume,
accounting and metrics ask one place and get one answer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from slime_like.errors import CheckpointError

DRAWN, IN_FLIGHT, READY, TAKEN = "drawn", "in_flight", "ready", "taken"
#: State of an open prompt -> those that it may go to, beside being dropped or put back.
_NEXT = {DRAWN: (IN_FLIGHT,), IN_FLIGHT: (READY,), READY: (TAKEN,), TAKEN: ()}


class Ledger:
    """Every prompt is open (in one of four states), waiting to be drawn again, trained, or dropped with a reason.

    position: prompts that were ever drawn; `open`, `num_trained` and `dropped` add up to it, with those that wait.
    on_drop: hears of each prompt that is dropped, and why; here they are only counted.
    """

    def __init__(self, on_drop: Callable[[int, str], None] | None = None) -> None:
        self._on_drop = on_drop
        self.position = 0
        self.num_trained = 0
        self.dropped: collections.Counter[str] = collections.Counter()  # reason -> prompts
        self.open: dict[int, str] = {}  # prompt -> state
        self._waiting: list[int] = []  # put back, in the order of the stream

    def draw(self, count: int) -> list[int]:
        """The next prompts: first those that were put back, then new ones."""
        again, self._waiting = self._waiting[:count], self._waiting[count:]
        new = range(self.position, self.position + count - len(again))
        self.position += len(new)
        drawn = [*again, *new]
        self.open |= dict.fromkeys(drawn, DRAWN)
        return drawn

    def move(self, prompt: int, state: str) -> None:
        """One step forward. Raises ValueError for a step that there is not."""
        now = self.open.get(prompt)
        if now is None or state not in _NEXT[now]:
            raise ValueError(f"prompt {prompt} is {now or 'not open'}: it cannot become {state}")
        self.open[prompt] = state

    def trained(self, prompts: Iterable[int]) -> None:
        """The trainer has used them. Raises ValueError for one that was not taken."""
        for prompt in sorted(set(prompts)):
            if self.open.get(prompt) != TAKEN:
                raise ValueError(
                    f"prompt {prompt} is {self.open.get(prompt) or 'not open'}: it cannot have been trained on"
                )
            del self.open[prompt]
            self.num_trained += 1

    def drop(self, prompt: int, why: str) -> None:
        """It will not be trained on."""
        if prompt not in self.open:
            raise ValueError(f"prompt {prompt} is not open: it cannot be dropped ({why})")
        del self.open[prompt]
        self.dropped[why] += 1
        if self._on_drop is not None:
            self._on_drop(prompt, why)

    def put_back(self, prompts: Iterable[int]) -> None:
        """They will be drawn again, before new ones: what they were asked for is lost, they are not."""
        back = [prompt for prompt in prompts if self.open.pop(prompt, None) is not None]
        self._waiting = sorted([*self._waiting, *back])

    def take_again(self, prompts: Iterable[int], state: str = TAKEN) -> None:
        """After a resume: their groups are there, ready or taken. Raises CheckpointError for one that does not wait."""
        missing = set(prompts) - set(self._waiting)
        if missing:
            raise CheckpointError(f"groups of prompts {sorted(missing)[:5]} were saved, which the ledger has as ended.")
        self._waiting = [prompt for prompt in self._waiting if prompt not in set(prompts)]
        self.open |= dict.fromkeys(prompts, state)

    def counts(self) -> dict[str, int]:
        """Prompts by state, and "trained", "dropped" and "waiting"."""
        states = collections.Counter(self.open.values())
        ends = {"trained": self.num_trained, "dropped": self.dropped.total(), "waiting": len(self._waiting)}
        return {state: states[state] for state in _NEXT} | ends

    def state_dict(self) -> dict:
        """As JSON. What is not trained or dropped is drawn again after a resume."""
        return {
            "position": self.position,
            "trained": self.num_trained,
            "dropped": dict(self.dropped),
            "open": {str(prompt): state for prompt, state in self.open.items()},
            "waiting": list(self._waiting),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state_dict, or from a position alone, as older checkpoints have it.

        Raises CheckpointError if it does not add up.
        """
        position = int(state["position"])
        ends = (int(state.get("trained", position)), {str(why): int(n) for why, n in state.get("dropped", {}).items()})
        back = sorted([*map(int, state.get("open", {})), *map(int, state.get("waiting", ()))])
        if ends[0] + sum(ends[1].values()) + len(back) != position or len(set(back)) != len(back):
            raise CheckpointError(
                f"the checkpoint's ledger of prompts does not add up: {position} were drawn, but {ends[0]} trained,"
                f" {sum(ends[1].values())} dropped and {len(back)} open ones are listed. Fix: another --ckpt-step, or"
                " --finetune."
            )
        self.position, self.num_trained, self.dropped = position, ends[0], collections.Counter(ends[1])
        self.open, self._waiting = {}, back
