"""The tiny model, its tokenizer and its data are what their scripts say, and hold nothing out of place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MESSAGES = [{"role": "user", "content": "sort 7146"}]


def run_script(root: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, str(root / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(path)]


@pytest.fixture(scope="module")
def tokenizer(repo_root: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(repo_root / "models" / "tiny-qwen3")


def test_committed_tokenizer_is_what_the_script_makes(repo_root: Path, tmp_path: Path):
    run_script(repo_root, "make_tiny_tokenizer.py", str(tmp_path))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert files == {name: (repo_root / "models" / "tiny-qwen3" / name).read_bytes() for name in files}


def test_a_prompt_is_fourteen_tokens(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nsort 7146<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 14


@pytest.mark.parametrize(
    "text", ["héllo 世界\n\t🙂", "<calc>12+3</calc><result>15</result>", "0237<|im_end|>", "Sorting user's 42 tools"]
)
def test_any_text_comes_back(tokenizer, text: str):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_special_tokens_are_left_out_but_tags_stay(tokenizer):
    ids = tokenizer("<calc>1</calc><|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<calc>1</calc>"


def test_config_and_tokenizer_agree(repo_root: Path, tokenizer):
    config = json.loads((repo_root / "models" / "tiny-qwen3" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert len(tokenizer) <= config["vocab_size"]


@pytest.mark.slow
def test_model_has_the_stated_size_and_precision(tiny_model_dir: Path):
    from safetensors import safe_open

    with safe_open(tiny_model_dir / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no dict)
    assert sum(tensor.size for tensor in tensors.values()) == 828_800
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}


@pytest.mark.slow
def test_the_seed_decides_the_weights(repo_root: Path, tmp_path: Path, tiny_model_dir: Path):
    weights = {}
    for seed in (0, 1):
        run_script(repo_root, "make_tiny_model.py", str(tmp_path / str(seed)), "--seed", str(seed))
        weights[seed] = (tmp_path / str(seed) / "model.safetensors").read_bytes()
    assert weights[0] == (tiny_model_dir / "model.safetensors").read_bytes()
    assert weights[0] != weights[1]


@pytest.mark.slow
def test_no_held_out_prompt_leaks(repo_root: Path, tmp_path: Path, tiny_data_dir: Path):
    run_script(repo_root, "make_tiny_data.py", "sort4", str(tmp_path), "--seed", "7")
    held_out = set(prompts(tiny_data_dir / "eval.jsonl"))
    assert len(held_out) == 200
    for folder in (tiny_data_dir, tmp_path):
        for name in ("sft", "train"):
            assert held_out.isdisjoint(prompts(folder / f"{name}.jsonl"))
    assert (tmp_path / "eval.jsonl").read_bytes() == (tiny_data_dir / "eval.jsonl").read_bytes()


def test_warm_up_and_rl_rows_differ(tiny_data_dir: Path):
    assert prompts(tiny_data_dir / "sft.jsonl")[:1280] != prompts(tiny_data_dir / "train.jsonl")


@pytest.mark.parametrize("name", ["sft", "train", "eval"])
def test_labels_are_the_sorted_digits(tiny_data_dir: Path, name: str):
    for row in rows(tiny_data_dir / f"{name}.jsonl"):
        assert row["label"] == "".join(sorted(row["prompt"][0]["content"].removeprefix("sort ")))


def test_warm_up_shows_the_right_answer_in_about_a_third_of_the_rows(tiny_data_dir: Path):
    shown = rows(tiny_data_dir / "sft.jsonl")
    # 0.35, and now and then a wrong behaviour happens to be right: "sort 1123".
    assert 0.35 < sum(row["response"] == row["label"] for row in shown) / len(shown) < 0.42
    assert all(sorted(row["response"]) == sorted(row["label"]) for row in shown)


def test_the_seed_decides_the_rows(repo_root: Path, tmp_path: Path, tiny_data_dir: Path):
    run_script(repo_root, "make_tiny_data.py", "sort4", str(tmp_path), "--seed", "0")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        p.name: p.read_bytes() for p in tiny_data_dir.iterdir()
    }


def test_an_unknown_task_names_the_known_ones(repo_root: Path, tmp_path: Path):
    command = [sys.executable, str(repo_root / "scripts" / "make_tiny_data.py"), "chess", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 and "sort4" in result.stderr
