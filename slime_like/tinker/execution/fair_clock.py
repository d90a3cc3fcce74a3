"""Whose turn it is: weighted fair sharing by tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class FairClock:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant with the least tokens by weight goes first.

    A tenant that has had nothing to do begins where the others are: idling saves up no claim. So between two tenants
    that always have work, tokens by weight differ by at most the larger of their largest calls.
    """

    def __init__(self, weight_of: Callable[[str], float] = lambda tenant: 1.0):
        """weight_of: a tenant's weight as it is at that moment, above 0."""
        self._weight_of = weight_of
        self._served: dict[str, float] = {}  # tokens by weight, of those that have work, or are ahead of the clock
        self._now = 0.0

    def position(self, tenant: str) -> float:
        """How far the tenant is; the least goes first."""
        return max(self._served.get(tenant, 0.0), self._now)

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant is served that much."""
        start = self.position(tenant)
        self._served[tenant] = start + tokens / self._weight_of(tenant)

    def advance(self, waiting: Iterable[str]) -> None:
        """The clock is where the tenant is that is furthest behind among those that have work now.

        Where none has, all begin anew from where the furthest was.
        """
        positions = [self.position(tenant) for tenant in waiting] or [max(self._served.values(), default=0.0)]
        self._now = max(self._now, min(positions))
        self._served = {tenant: served for tenant, served in self._served.items() if served > self._now}
