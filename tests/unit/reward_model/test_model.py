"""A reward model's scores are transformers' own, whatever batch a sample falls into.

A folder that is none is refused.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification, Qwen3Config

from slime_like.errors import CheckpointError, RewardError
from slime_like.reward_model.inputs import RewardInput
from slime_like.reward_model.model import RewardModel
from tests.helpers.tiny_rewards import TINY, hf_scores, make_reward_model

EOS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("reward"))


def load(folder, batch_size=4, **options) -> RewardModel:
    return RewardModel(str(folder), policy_folder=str(TINY), batch_size=batch_size, **options)


def sequences(count=9, longest=40):
    """Random lengths, ends that look like padding included."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(3, 500, int(rng.integers(1, longest))).astype(np.int32) for _ in range(count)]
    return [*drawn, np.array([5, 9, EOS, EOS]), np.array([5, 9, 0, 0]), np.array([7, 0])]


def as_inputs(tokens):
    return [
        RewardInput(name=f"prompt {i}, sample 0", tokens=one, prompt="", response="") for i, one in enumerate(tokens)
    ]


@pytest.mark.parametrize("pad_token_id", [None, EOS, 0])
def test_scores_are_transformers_own_in_every_batch(tmp_path, pad_token_id):
    folder, tokens = make_reward_model(tmp_path, pad_token_id=pad_token_id), sequences()
    expected = hf_scores(folder, tokens)
    assert np.std(expected) > 0.1
    for batch_size in (1, 5, 64):
        model = load(folder, batch_size)
        assert model.reads_tokens
        np.testing.assert_allclose(model.score(as_inputs(tokens)), expected, atol=1e-5, rtol=0)


def test_a_bidirectional_classifier_sees_no_padding(tmp_path):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "num_labels": 1,
    }
    BertForSequenceClassification(
        BertConfig(**sizes, initializer_range=0.3, max_position_embeddings=64)
    ).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, tmp_path / name)
    tokens = sequences(6)[:6]
    np.testing.assert_allclose(load(tmp_path).score(as_inputs(tokens)), hf_scores(tmp_path, tokens), atol=1e-5, rtol=0)


def other_tokenizer(folder, *, template):
    """The tiny tokenizer with two of its tokens exchanged: its ids mean something else."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    a, b = (next(key for key, value in vocab.items() if value == number) for number in sorted(vocab.values())[-2:])
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_another_vocabulary_reads_text_through_its_own_template(tmp_path):
    folder = make_reward_model(tmp_path)
    other_tokenizer(folder, template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    assert not model.reads_tokens
    chat = [{"role": "user", "content": "sort 7302"}]
    wrong = np.array([3, 4, 5])  # must not be read
    inputs = [
        RewardInput(name="a", tokens=wrong, prompt="<|im_start|>user\nsort 7302", response="0237", messages=chat),
        RewardInput(name="b", tokens=wrong, prompt="sort 7302 = ", response="0237"),
    ]
    texts = ["user: sort 7302\nassistant: 0237\n", "sort 7302 = 0237"]
    expected = hf_scores(folder, [np.array(tokenizer(text)["input_ids"]) for text in texts])
    np.testing.assert_allclose(model.score(inputs), expected, atol=1e-5, rtol=0)


def test_a_template_that_refuses_names_the_sample(tmp_path):
    folder = make_reward_model(tmp_path)
    other_tokenizer(folder, template="{{ raise_exception('no such role') }}")
    one = RewardInput(
        name="prompt 3, sample 1",
        tokens=np.array([3]),
        prompt="x",
        response="y",
        messages=[{"role": "user", "content": "x"}],
    )
    with pytest.raises(RewardError, match="chat template refuses prompt 3, sample 1: TemplateError: no such role"):
        load(folder).score([one])


def test_half_precision_is_asked_for(folder):
    tokens = sequences()
    full, half = (load(folder, bf16=bf16).score(as_inputs(tokens)) for bf16 in (False, True))
    assert 1e-5 < np.abs(full - half).max() < 0.1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            np.full(513, 7),
            (
                r"prompt 1, sample 0 has 513 tokens .* which takes 512 \(max_position_embeddings\). Fix:"
                r" --rollout-max-context-len"
            ),
        ),
        (np.array([3, 512]), "prompt 1, sample 0: 2 tokens with ids up to 512; .* knows 512 ids"),
        (np.array([], dtype=np.int32), "prompt 1, sample 0: 0 tokens"),
    ],
)
def test_what_it_cannot_read_is_named(folder, tokens, message):
    with pytest.raises(RewardError, match=message):
        load(folder).score(as_inputs([np.array([3]), tokens]))


def test_a_score_that_is_no_number_is_named(tmp_path):
    folder = make_reward_model(tmp_path)
    model = load(folder)
    with torch.no_grad():
        model._model.get_input_embeddings().weight[9] = float("nan")
    with pytest.raises(RewardError, match="gave nan for prompt 1, sample 0"):
        model.score(as_inputs([np.array([3]), np.array([9])]))


def no_model(path):
    """An empty folder."""


def two_outputs(path):
    make_reward_model(path, num_labels=2)


def language_model(path):
    """No score head: transformers would draw one at random and only warn."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, vocab_size=512, num_labels=1)).save_pretrained(path)


def no_tokenizer(path):
    make_reward_model(path, tokenizer=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_model, "has no config.json. Fix: --reward-load with a folder"),
        (two_outputs, "has 2 outputs, and a reward is one"),
        (language_model, "1 weights are missing: score.weight"),
        (no_tokenizer, "has no tokenizer"),
    ],
)
def test_a_folder_that_is_no_reward_model_is_refused(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
