"""What the tests of the server share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder whose fsync costs nothing, where the host has one: for tests that commit thousands of times."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="slime_like-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
