"""SGLang's argument list is read from its source, and user flags are checked against it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from slime_like.sglang_backend.server_args import (
    MANY,
    ONE,
    OPTIONAL_SWITCH,
    SWITCH,
    _collect,
    check_flags,
    merge_flags,
    to_argv,
)

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed, so there is no list to check against"
)


def collect(source: str) -> dict:
    import ast

    known: dict = {}
    _collect(ast.parse(source), known)
    return known


def test_both_forms_of_declaration_are_read():
    known = collect("""
class Fields:
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    trust: A[bool, "x"] = False
    fast: A[Optional[bool], Arg(action=argparse.BooleanOptionalAction)] = None
    sizes: A[Optional[List[int]], "x"] = None
    kind: A[Literal["a", "b"], "x"] = "a"
    hidden: A[bool, Arg(help="x", no_cli=True)] = False
    computed: A[int, Derived("x")] = 0
    plain: int = 3
def old(parser):
    parser.add_argument("--chunk-size", "--cs", type=int)
    parser.add_argument("--be-quick", action="store_true")
    parser.add_argument("--names", nargs="*")
""")
    kinds = {name: argument.kind for name, argument in known.items()}
    assert kinds == {
        "tp_size": ONE, "tensor_parallel_size": ONE, "trust": SWITCH, "fast": OPTIONAL_SWITCH,
        "no_fast": OPTIONAL_SWITCH,
        "sizes": MANY, "kind": ONE, "chunk_size": ONE, "cs": ONE, "be_quick": SWITCH, "names": MANY,
    }  # fmt: skip
    assert known["tensor_parallel_size"].field == "tp_size" and known["cs"].field == "chunk_size"
    assert known["kind"].choices == ("a", "b")


@needs_sglang
def test_good_flags_pass():
    flags = {
        "mem_fraction_static": "0.4",
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": ["1", "2"],
        "attention_backend": "triton",
    }
    assert check_flags(flags) == ([], [])


@needs_sglang
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mem_fracton_static": "0.4"}, ["--sglang-mem-fracton-static", "Did you mean --sglang-mem-fraction-static?"]),
        ({"disable_radix_cache": "yes"}, ["--sglang-disable-radix-cache is a switch", "yes"]),
        ({"max_running_requests": "many"}, ["--sglang-max-running-requests many: not an integer"]),
        ({"mem_fraction_static": True}, ["--sglang-mem-fraction-static needs a value"]),
        ({"mem_fraction_static": ["1", "2"]}, ["takes one value, but got 2"]),
        ({"startup_weight_load_mode": "never"}, ["SGLang knows serial, overlap"]),
        ({"port": "1"}, ["--sglang-port cannot be set"]),
        ({"tp": "2"}, ["--sglang-tp cannot be set", "--rollout-num-gpus-per-engine"]),
        ({"tensor_parallel_size": "2"}, ["--sglang-tensor-parallel-size cannot be set"]),
        ({"api_key": "x"}, ["--sglang-api-key cannot be set: one is generated"]),
        ({"model": "x"}, ["--sglang-model cannot be set: it is --hf-checkpoint"]),
    ],
)
def test_bad_flags_are_named(flags, words):
    problems, notes = check_flags(flags)
    assert len(problems) == 1 and notes == []
    for word in words:
        assert word in problems[0]


def test_every_problem_is_listed():
    assert len(check_flags({"port": "1", "host": "x", "api_key": "y"})[0]) == 3


def test_command_line():
    assert to_argv({"a_b": "-1", "c": ["1", "2"], "d": True, "e": False}) == ["--a-b=-1", "--c", "1", "2", "--d"]


@needs_sglang
def test_user_flags_win_over_defaults_in_every_spelling():
    merged = merge_flags(
        {"context_length": 8, "sleep_on_idle": True, "served_model_name": "x"},
        {"sleep_on_idle": "false", "context_length": "9"},
    )
    assert to_argv(merged) == ["--served-model-name=x", "--context-length=9"]


@needs_sglang
def test_reading_the_list_is_quick_and_imports_neither_sglang_nor_torch():
    code = (
        "import sys, time; from slime_like.sglang_backend.server_args import check_flags; start = time.perf_counter();"
        "assert check_flags({'no_such': '1'})[0]; seconds = time.perf_counter() - start;"
        "assert not {'sglang', 'torch'} & set(sys.modules); print(seconds)"
    )
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert best < 0.15
