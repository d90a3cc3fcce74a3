"""No weights and no checkpoint give a traceback, or run what is in them."""

from __future__ import annotations

import pytest

from tests.fuzz import weight_files
from tests.fuzz.cases import run_all, sample


def test_a_part_of_all_safetensors(tmp_path):
    corpus = list(weight_files.safetensors_cases(tmp_path))
    assert len(corpus) > 94
    outcomes = run_all(sample(corpus, 80))
    assert outcomes["taken"] < 5


def test_a_part_of_all_checkpoints(tmp_path):
    corpus = list(weight_files.checkpoint_cases(tmp_path))
    assert len(corpus) > 53
    run_all(sample(corpus, 60))


@pytest.mark.long_run
def test_all_weights_and_checkpoints(tmp_path):
    run_all([*weight_files.safetensors_cases(tmp_path), *weight_files.checkpoint_cases(tmp_path)])
