"""The keys of --backend-config, and the flags that they stand for."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.errors import ConfigError

_ENGINE, _POLICY = "generator.inference_engine.", "trainer.policy."
NUM_ENGINES = _ENGINE + "num_engines"
ENGINE_SIZE = _ENGINE + "tensor_parallel_size"
COLOCATE = "trainer.placement.colocate_all"
MERGE = _POLICY + "megatron_config.lora_config.merge_lora"
MICRO_TRAIN, MICRO_FORWARD = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
MAX_LORAS, MAX_CPU_LORAS = _POLICY + "model.lora.max_loras", _POLICY + "model.lora.max_cpu_loras"
_ENGINE_GPUS, _ALL_ENGINES_GPUS = "--rollout-num-gpus-per-engine", "--rollout-num-gpus"
_MICRO_BATCH, _SCORING_MICRO_BATCH = "--micro-batch-size", "--log-probs-micro-batch-size"

#: Keys of whole numbers above 0 -> the flag of train.py, or of the server, that says the same.
COUNTS = {
    "trainer.placement.policy_num_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.placement.policy_num_nodes": "--actor-num-nodes",
    ENGINE_SIZE: _ENGINE_GPUS,
    MAX_LORAS: "--max-loras",
    MAX_CPU_LORAS: "--max-cpu-loras",
    _POLICY + "megatron_config.tensor_model_parallel_size": "--tensor-model-parallel-size",
    _POLICY + "megatron_config.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    _POLICY + "megatron_config.context_parallel_size": "--context-parallel-size",
    _POLICY + "megatron_config.expert_model_parallel_size": "--expert-model-parallel-size",
}
SHARE = _ENGINE + "gpu_memory_utilization"
_MEMORY = "--sglang-mem-fraction-static"
KEYS = (*COUNTS, NUM_ENGINES, MICRO_TRAIN, MICRO_FORWARD, SHARE, COLOCATE, MERGE)


def read_keys(text: str, plain: Sequence[str]) -> tuple[str, ...]:
    """--backend-config as flags, as they would be typed. plain: those that were typed beside it, with which it must not
    disagree.

    Raises ConfigError with every problem.
    """
    values = _parsed(text)
    problems = [problem for key in values if (problem := _problem(key, values[key]))]
    if problems:
        raise ConfigError(problems)
    flags = _flags(values, plain)
    problems = []
    argv: list[str] = []
    for flag, (value, keys) in flags.items():
        typed = typed_value(plain, flag)
        if typed is None:
            argv += [flag] if value is True else [flag, str(value)]
        elif not _same(typed, value):
            where = " and ".join(f"{key!r}: {json.dumps(values[key])}" for key in keys)
            problems.append(
                f"--backend-config says {where}, and {flag} {shlex.join(typed)} says otherwise. Fix: drop one."
            )
    if problems:
        raise ConfigError(problems)
    return tuple(argv)


def typed_value(argv: Sequence[str], flag: str) -> list[str] | None:
    """The values of a flag on a command line, of the last where it is there several times; None: it is not there.

    Example: ["--a", "1", "2", "--b"], "--a" -> ["1", "2"]; "--b" -> []. "--no-b" counts as "--b" with ["false"].
    """
    value: list[str] | None = None
    reading = False
    for text in argv:
        name, equals, rest = text.partition("=")
        if text.startswith("--"):
            reading = name == flag
            if reading:
                value = [rest] if equals else []
            elif name == f"--no-{flag[2:]}":
                value = ["false"]
        elif reading and value is not None:
            value.append(text)
    return value


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"--backend-config is no JSON: {error}."]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"--backend-config is no JSON object of keys and values, but {text[:100]}."])
    return values


def _problem(key: str, value: Any) -> str | None:
    shown = f"--backend-config {key!r}: {json.dumps(value)}"
    if key not in KEYS:
        close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5) or [
            known for known in KEYS if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
        ]
        return f"{shown}: unknown key." + (f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(KEYS)}.")
    if key in (COLOCATE, MERGE):
        if not isinstance(value, bool):
            return f"{shown}: true or false."
        if key == MERGE and value:
            return (
                f"{shown}: clients' adapters are served by name, over one base that all share; none is merged into it."
                " Fix: false, or leave it out."
            )
        return None
    if key == SHARE:
        is_share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1
        return None if is_share else f"{shown}: a share of the GPU's memory, above 0 and below 1."
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"{shown}: a whole number of at least 1."
    return None


def _flags(values: Mapping[str, Any], plain: Sequence[str]) -> dict[str, tuple[Any, list[str]]]:
    """Flag -> (its value, the keys that say so)."""
    flags: dict[str, tuple[Any, list[str]]] = {
        flag: (values[key], [key]) for key, flag in COUNTS.items() if key in values
    }
    if NUM_ENGINES in values:
        size, keys = values.get(ENGINE_SIZE), [NUM_ENGINES]
        if size is None:
            typed = typed_value(plain, _ENGINE_GPUS)
            size = int(typed[0]) if typed and typed[0].isdecimal() else 1
        else:
            keys.append(ENGINE_SIZE)
        flags[_ALL_ENGINES_GPUS] = (values[NUM_ENGINES] * size, keys)
    if SHARE in values:
        flags[_MEMORY] = (values[SHARE], [SHARE])
    if MICRO_TRAIN in values:
        flags[_MICRO_BATCH] = (values[MICRO_TRAIN], [MICRO_TRAIN])
    if MICRO_FORWARD in values:  # alone it serves both: rows are either counted or packed by tokens
        of_both = MICRO_TRAIN not in values and typed_value(plain, _MICRO_BATCH) is None
        flags[_MICRO_BATCH if of_both else _SCORING_MICRO_BATCH] = (values[MICRO_FORWARD], [MICRO_FORWARD])
    if COLOCATE in values:
        flags["--colocate"] = (True if values[COLOCATE] else "", [COLOCATE])
        if not values[COLOCATE]:
            if typed_value(plain, "--colocate") in (None, ["false"]):
                del flags["--colocate"]  # it is the default
    return flags


def _same(typed: Sequence[str], value: Any) -> bool:
    if value is True:
        return list(typed) == []
    try:
        return len(typed) == 1 and float(typed[0]) == float(value)
    except ValueError:
        return False
