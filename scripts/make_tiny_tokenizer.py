"""Write the tiny models' tokenizer: byte-level BPE in Qwen2's manner, small enough to read.

usage: make_tiny_tokenizer.py OUT

256 byte symbols, so that any text round-trips; a few whole words, so that prompts are short; one token a digit; ChatML.
The files in models/tiny-*/ are this script's output (a test compares them).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

#: Left out of decoded text by skip_special_tokens.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Visible in decoded text: what a tool call and its answer look like.
TAG_TOKENS = ("<calc>", "</calc>", "<result>", "</result>")
WORDS = ("user", "assistant", "system", "tool", "sort", "guess", "higher", "lower", "correct")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
    "chat_template": CHAT_TEMPLATE,
}


def build_tokenizer() -> Tokenizer:
    """The tokenizer: bytes, then each word's prefixes (a merge needs both its parts), then the special tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}  # a dict keeps the order and drops repeats
    for word in WORDS:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            vocab.setdefault(word[: end + 1], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    # A run of letters, one digit, or one other character at a time; then bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAG_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, byte for byte the same on every run."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder to write into.")
    write_tokenizer(parser.parse_args().out)


if __name__ == "__main__":
    main()
