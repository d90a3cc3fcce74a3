"""Links that stand for a tenant's right to read saved weights, for a while."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import OrderedDict

from slime_like.tinker.store.rows import missing

_MAX_LINKS = 4096


@dataclasses.dataclass(frozen=True)
class DownloadLink:
    """Who may read what for how long: whoever has the link reads as its tenant."""

    path: str
    tenant: str
    expires: float


class Links:
    """Links by what cannot be guessed of them; those of an earlier process of the server do not work any more."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, DownloadLink] = OrderedDict()

    def make(self, link: DownloadLink) -> str:
        """A new link's token; beyond a number, the oldest ends."""
        token = secrets.token_urlsafe(32)
        self._links[token] = link
        while len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)
        return token

    def get(self, token: str) -> DownloadLink:
        """Raises Refused (404) for one that does not work, or not any more."""
        link = self._links.get(token)
        if link is None or link.expires < time.time():
            raise missing("such link")
        return link
