"""No value of any flag gives a traceback."""

from __future__ import annotations

import pytest

from tests.fuzz import flags
from tests.fuzz.cases import run_all, sample


def test_a_part_of_all_flags_and_values():
    corpus = flags.cases()
    assert len(corpus) > 5503
    run_all(sample(corpus, 300))


@pytest.mark.long_run
@pytest.mark.timeout(1200)
def test_all_flags_and_values():
    run_all(flags.cases())
