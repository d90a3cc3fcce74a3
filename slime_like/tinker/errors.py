"""What goes wrong between a client and the backends."""

from __future__ import annotations

from slime_like.errors import RunError


class Refused(RunError):
    """A call that is not taken now. status: HTTP's; retry_after_s: when to come again, where that helps."""

    def __init__(self, message: str, *, status: int, retry_after_s: float | None = None):
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class BackendLost(RunError):
    """Trainer or engines died and are being built anew; what was not saved there is gone."""
