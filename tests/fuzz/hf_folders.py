"""HF folders: config.json with keys of a wrong type, sign or size; tokenizer files that are broken or hostile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_like.config.hf_keys import KEYS, ROPE_KEYS
from slime_like.job.command_line import parse_args
from slime_like.planning.report.render import as_json, make_report
from slime_like.rollout.tokenizer import encode, end_of_turn_id, load_tokenizer
from slime_like.utils.chat_templates import try_template
from tests.fuzz.cases import Case

MODELS = Path(__file__).parents[2] / "models"
VALUES: tuple[Any, ...] = (
    None, True, "", "x", [], {}, [[]], 0, -1, 1, 3, 0.5, 1e308, float("nan"), float("inf"), 10**30, 2**31, "٣",
    {"a": 1},
)  # fmt: skip
_FLAGS = [
    "--prompt-data", "rows.jsonl", "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--rm-type", "exact", "--actor-num-gpus-per-node", "1", "--colocate", "--micro-batch-size", "1", "--plan",
]  # fmt: skip
#: Chat templates that must not be taken for the end of the world.
TEMPLATES = (
    "{{", "{% for %}", "{{ 1/0 }}", "{{ messages.x.y }}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages|map(attribute='content')|join }}", "", "{{ messages[0]['content'] }}", "{{ lipsum.__globals__ }}",
    "{% include 'x' %}", "{% set x = messages %}{{ x.append(1) }}", "{{ range(10**9) }}", "{" * 10_000,
    "{{" + "(" * 5000,
    "{{ " + "-" * 5000 + "1 }}", "x" * 10_000_000, "{{ strftime_now('%') }}", "{{ messages|tojson }}" * 100,
)  # fmt: skip
#: Templates that take for ever, or all memory.
HOSTILE_TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**11 }}",
    "{{ (10**10**8)|string|length }}",
    "{% set x = namespace(t='a') %}{% for a in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}{{ x.t }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
)


def _planned(folder: Path) -> None:
    command = parse_args(["--hf-checkpoint", str(folder), *_FLAGS])
    as_json(make_report(command.config, planning=True))


def _tokenized(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    try_template(tokenizer, {}, seconds=2.0)
    encode(tokenizer, ["abc 12", ""])
    end_of_turn_id(tokenizer, None)


def configs(scratch: Path) -> Iterator[Case]:
    """Each key of each small model, with each value; and files that are no config at all."""
    for model in ("tiny-qwen3", "tiny-qwen3-moe"):
        config = json.loads((MODELS / model / "config.json").read_text())
        rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
        keys = sorted(set(KEYS) | set(config)) if model == "tiny-qwen3" else sorted(set(KEYS) - {"architectures"})
        for key in keys:
            for value in VALUES if model == "tiny-qwen3" else VALUES[::3]:
                yield _config_case(scratch, f"{model} {key} = {str(value)[:20]}", config | {key: value})
        for key in ROPE_KEYS if model == "tiny-qwen3" else ():
            for value in VALUES[::2]:
                changed = config | {"rope_parameters": rope | {key: value}}
                yield _config_case(scratch, f"{model} rope {key} = {str(value)[:20]}", changed)
        for key in config:
            yield _config_case(scratch, f"{model} without {key}", {k: v for k, v in config.items() if k != key})
    whole = (MODELS / "tiny-qwen3" / "config.json").read_bytes()
    for name, data in _broken(whole):
        yield _case(scratch, f"config.json {name}", {"config.json": data}, _planned)


def tokenizers(scratch: Path) -> Iterator[Case]:
    """Files that are broken, keys of wrong types, and templates."""
    folder = MODELS / "tiny-qwen3"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (folder / name).read_bytes()
        for what, data in _broken(whole):
            yield _case(scratch, f"{name} {what}", {name: data}, _tokenized)
        content = json.loads(whole)
        for key in content:
            for value in VALUES[::2]:
                data = json.dumps(content | {key: value}).encode()
                yield _case(scratch, f"{name} {key} = {str(value)[:20]}", {name: data}, _tokenized)
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    for template in (*TEMPLATES, *HOSTILE_TEMPLATES):
        data = json.dumps(config | {"chat_template": template}).encode()
        yield _case(scratch, f"chat template {template[:60]}", {"tokenizer_config.json": data}, _tokenized)


def _broken(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Content that is no JSON, or no object."""
    yield "empty", b""
    yield "cut", whole[: len(whole) // 2]
    yield "a list", b"[1, 2]"
    yield "null", b"null"
    yield "no text", bytes(range(256)) * 4
    yield "NUL", b"\0" * 1000
    yield "deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield "long number", b'{"hidden_size": ' + b"9" * 10_000 + b"}"
    yield "surrogate", b'{"model_type": "\\ud800"}'
    yield "UTF-16", whole.decode().encode("utf-16")
    yield "large", b'{"a": "' + b"x" * 5_000_000 + b'"}'


def _config_case(scratch: Path, name: str, config: dict) -> Case:
    return _case(scratch, name, {"config.json": json.dumps(config).encode()}, _planned)


def _case(scratch: Path, name: str, files: dict[str, bytes], take) -> Case:
    def run() -> None:
        folder = scratch / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(MODELS / "tiny-qwen3", folder)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        take(folder)

    return Case(name, run)
