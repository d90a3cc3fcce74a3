"""Prompts whose reward, environment or function fails again and again: asked a few times, then put aside for the rest
of the run and named (--on-reward-error drop). Plain state, no clock.
"""

from __future__ import annotations

import collections
import logging

from slime_like.config.reward import RewardConfig
from slime_like.errors import RewardError

logger = logging.getLogger(__name__)

#: Why the ledger drops a prompt that is put aside.
PUT_ASIDE = "put_aside"
#: The share of groups with an error is looked at over so many, and not before so many have ended.
WINDOW, FIRST_LOOK = 256, 32
#: Of an error, what is kept in a checkpoint and in the list at the end.
_ERROR_CHARS = 300


class PutAside:
    """Counts errors by row. A row is put aside at its --reward-error-tries'th group with one."""

    def __init__(self, config: RewardConfig):
        self._tries, self._share = config.reward_error_tries, config.max_reward_error_share
        self.rows: dict[int, str] = {}  # row that is put aside -> its last error
        self._num_errors: dict[int, int] = {}  # row -> groups with an error, of rows that are not put aside
        self._recent: collections.deque[bool] = collections.deque(maxlen=WINDOW)

    def ended(self, row: int, error: str | None) -> bool:
        """Count a group of this row; whether it is put aside by this error.

        Raises RewardError if too many of the last groups had one.
        """
        self._recent.append(error is not None)
        if error is None:
            self._num_errors.pop(row, None)
            return False
        self._check_share(error)
        self._num_errors[row] = self._num_errors.get(row, 0) + 1
        if self._num_errors[row] < self._tries:
            return False
        del self._num_errors[row]
        self.rows[row] = error[:_ERROR_CHARS]
        logger.warning("row %d is put aside for the rest of the run after %d errors: %s", row, self._tries, error)
        return True

    def summary(self) -> str | None:
        """What to say at the end; None if nothing was put aside."""
        if not self.rows:
            return None
        named = "; ".join(f"row {row}: {error}" for row, error in sorted(self.rows.items())[:20])
        more = f"; and {len(self.rows) - 20} more, in dropped.jsonl" if len(self.rows) > 20 else ""
        return f"{len(self.rows)} rows were put aside, since their rewards or environments failed: {named}{more}"

    def state_dict(self) -> dict:
        """As JSON."""
        return {
            "rows": {str(row): error for row, error in self.rows.items()},
            "errors": {str(row): number for row, number in self._num_errors.items()},
            "recent": [int(failed) for failed in self._recent],
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state_dict."""
        self.rows = {int(row): str(error) for row, error in state.get("rows", {}).items()}
        self._num_errors = {int(row): int(number) for row, number in state.get("errors", {}).items()}
        self._recent = collections.deque(map(bool, state.get("recent", ())), maxlen=WINDOW)

    def _check_share(self, error: str) -> None:
        number, errors = len(self._recent), sum(self._recent)
        if number >= FIRST_LOOK and errors > self._share * number:
            raise RewardError(
                f"{errors} of the last {number} groups had an error in a reward, an environment or a function, more"
                f" than --max-reward-error-share {self._share:g} allows. The last: {error}. Fix: mend it, or allow"
                " more."
            )
