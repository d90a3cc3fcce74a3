"""No config.json and no tokenizer gives a traceback, takes for ever or fills memory."""

from __future__ import annotations

import pytest

from tests.fuzz import hf_folders
from tests.fuzz.cases import run_all, sample


def test_a_part_of_all_configs(tmp_path):
    corpus = list(hf_folders.configs(tmp_path))
    assert len(corpus) > 397
    run_all(sample(corpus, 150))


def test_a_part_of_all_tokenizers(tmp_path):
    run_all(sample(list(hf_folders.tokenizers(tmp_path)), 40))


@pytest.mark.long_run
@pytest.mark.timeout(1200)
def test_all_configs_and_tokenizers(tmp_path):
    run_all([*hf_folders.configs(tmp_path), *hf_folders.tokenizers(tmp_path)])
