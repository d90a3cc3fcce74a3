"""Prompts without a file."""

from __future__ import annotations

import pytest

from slime_like.config.data import DataConfig
from slime_like.errors import DataError
from slime_like.rollout.agents.sources import generated_rows
from slime_like.rollout.data_source import load_data

DATA = DataConfig(num_rollout=1, apply_chat_template=True)


def test_seeds_are_rows():
    assert generated_rows("train.jsonl", DATA) is None
    assert [row["metadata"]["seed"] for _, row in generated_rows("seeds:3", DATA) or []] == [0, 1, 2]
    assert [row["metadata"]["seed"] for _, row in generated_rows("seeds:7:9", DATA) or []] == [7, 8]


@pytest.mark.parametrize("path", ["seeds:", "seeds:x", "seeds:5:5", "seeds:-1"])
def test_no_range_of_seeds(path):
    with pytest.raises(DataError, match="seeds"):
        generated_rows(path, DATA)


def test_a_data_source_of_seeds_takes_slices_and_names_no_file(tokenizer):
    source = load_data("seeds:10@[2:4]", DATA, tokenizer, max_prompt_tokens=50, max_tokens=60)
    assert [source.prompt_at(place).metadata for place in range(3)] == [{"seed": 2}, {"seed": 3}, {"seed": 2}]
    assert DataConfig(num_rollout=1, prompt_data="seeds:10").missing_files() == []
    assert DataConfig(num_rollout=1, prompt_data="seed:10").missing_files() == ["--prompt-data seed:10: no such file."]


def test_questions_of_reasoning_gym(tokenizer):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra: envs)")
    source = load_data(
        "rg:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=4",
        DATA,
        tokenizer,
        max_prompt_tokens=400,
        max_tokens=500,
    )
    prompts = [source.prompt_at(place) for place in range(4)]
    assert len({prompt.text for prompt in prompts}) > 1
    assert all(prompt.metadata["reasoning_gym"]["entry"]["answer"].lstrip("-").isdigit() for prompt in prompts)
    with pytest.raises(DataError, match="rg:no_such_task: reasoning-gym refuses it"):
        generated_rows("rg:no_such_task", DATA)
