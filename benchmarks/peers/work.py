"""The work that both sides of a comparison do: prompts, a reward, a model that never ends early, fixed samples.

Imports nothing but numpy and the standard library: each side runs in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path

import numpy as np

#: Words that the tokenizers of the models here have as one token behind a space; each side counts its prompts.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work number night point home water room mother area money"
    " story fact month lot right study book eye job word business issue side kind head house service friend father"
    " power hour game line end member law car city community name"
).split()
REWARDED_MODULUS = 5


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a step works on: prompts x samples of each x tokens of a prompt x new tokens. Example: 4x8x140x12."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """From 4x8x140x12."""
        return cls(*(int(part) for part in text.split("x")))

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.prompts * self.samples


def prompt(number: int, num_tokens: int) -> str:
    """A text of so many single-token words, another one for each number."""
    generator = np.random.default_rng((number, num_tokens))
    return "".join(f" {WORDS[i]}" for i in generator.integers(0, len(WORDS), num_tokens))


def reward(text: str) -> float:
    """A number of the answer that costs nothing and differs between answers."""
    return float(zlib.crc32(text.encode()) % REWARDED_MODULUS)


def endless_model(source: Path, target: Path) -> str:
    """A folder with the model of `source` in fp32, whose answers end at the token limit only: the token that ends them
    is one beyond its vocabulary. Returns the folder.
    """
    target.mkdir(parents=True)
    config, tokenizer, texts = (_read(source / name) for name in ("config.json", "tokenizer.json", _TEXTS))
    never, other = config["vocab_size"], texts.get("pad_token") or texts["eos_token"]
    known = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    tokenizer["added_tokens"] += [
        _NEVER | {"id": number, "content": f"<|never {number}|>"} for number in range(max(known) + 1, never + 1)
    ]
    own = {
        "config.json": config | {"eos_token_id": never, "dtype": "float32"},
        "generation_config.json": {"eos_token_id": never, "pad_token_id": 0},
        "tokenizer.json": tokenizer,
        _TEXTS: texts | {"eos_token": f"<|never {never}|>", "pad_token": other},
    }
    for name in os.listdir(source):
        if name not in own:
            (target / name).symlink_to((source / name).resolve())
    for name, content in own.items():
        (target / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return str(target)


_TEXTS = "tokenizer_config.json"
_NEVER = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def fixed_samples(shape: Shape, vocabulary: int) -> list[dict]:
    """Samples for a loss that both sides compute: "prompt", "answer" (ids; answers of different lengths), "advantage".

    What they lack, "old" log-probs, the first side adds: its own with `noise`, so that ratios differ from one.
    """
    generator = np.random.default_rng(3)
    samples = []
    for _ in range(shape.prompts):
        own = generator.integers(0, vocabulary, shape.prompt_tokens).tolist()
        for _ in range(shape.samples):
            length = int(generator.integers(max(1, shape.new_tokens // 2), shape.new_tokens + 1))
            answer = generator.integers(0, vocabulary, length).tolist()
            samples.append({"prompt": own, "answer": answer, "advantage": float(np.float32(generator.normal()))})
    return samples


def noise(index: int, length: int) -> np.ndarray:
    """What a sample's old log-probs differ by from those of the model, float32: some ratios are clipped."""
    return (0.2 * np.random.default_rng((7, index)).standard_normal(length)).astype(np.float32)
