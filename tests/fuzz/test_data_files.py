"""No data file gives a traceback."""

from __future__ import annotations

import pytest

from tests.fuzz import data_files
from tests.fuzz.cases import run_all, sample


def test_a_part_of_all_data_files(tmp_path):
    corpus = list(data_files.cases(tmp_path))
    assert len(corpus) > 212
    run_all(sample(corpus, 60))


@pytest.mark.long_run
@pytest.mark.timeout(1200)
def test_all_data_files(tmp_path):
    run_all(list(data_files.cases(tmp_path)))
