"""The engines that tests of broadcasts share, started once for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weight_sync.fake_engines import Nest


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    nest = Nest(2, 1)
    yield nest
    nest.close()
