"""The pretended device, for tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pretend_gpu.processes import Pretender, why_not


@pytest.fixture(scope="session")
def pretend() -> Iterator[Pretender]:
    """Runs a function in processes that have a CUDA device, which is pretended; skips, with the reason, where this host
    cannot.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    pretender = Pretender()
    yield pretender
    pretender.close()
