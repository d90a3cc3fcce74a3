"""Every flag that public run scripts of this kind use is taken with its meaning, or refused with a reason that names
what to do.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from arguments import build_parser, parse_args
from slime_like.config.run import GROUPS
from slime_like.config.slime_flags.refused import REFUSED, REFUSED_VALUES, take_refused
from slime_like.config.slime_flags.taken import BUILT_IN, IDLE_WITHOUT, SAID_ANYWAY
from slime_like.errors import ConfigError
from slime_like.sglang_backend.server_args import RESERVED, known_arguments, present_names

LINES = [
    line for line in (Path(__file__).parent / "compat_flags.txt").read_text().splitlines() if not line.startswith("#")
]

#: A command line that works; what a flag needs beside it, or does not go with, is in WITH.
BASE: dict[str, str | None] = {
    "--hf-checkpoint": "/models/some-model", "--ref-load": "/models/some-model", "--prompt-data": "/data/train.jsonl",
    "--num-layers": "48", "--hidden-size": "4096", "--ffn-hidden-size": "12288", "--num-attention-heads": "32",
    "--group-query-attention": "",
    "--num-query-groups": "4", "--kv-channels": "128", "--vocab-size": "151936", "--normalization": "RMSNorm",
    "--swiglu": "",
    "--disable-bias-linear": "", "--untie-embeddings-and-output-weights": "",
    "--actor-num-nodes": "1", "--actor-num-gpus-per-node": "8", "--colocate": "", "--lr": "1e-5",
    "--rm-type": "math", "--num-rollout": "3", "--rollout-batch-size": "32", "--n-samples-per-prompt": "8",
    "--eval-prompt-data": "aime /data/aime.jsonl", "--eval-interval": "5", "--save": "/save", "--use-kl-loss": "",
    "--use-dynamic-batch-size": "", "--max-tokens-per-gpu": "4096",
}  # fmt: skip
LATENT = (
    "--q-lora-rank",
    "--kv-lora-rank",
    "--qk-head-dim",
    "--qk-pos-emb-head-dim",
    "--v-head-dim",
    "--rotary-scaling-factor",
    "--mscale-all-dim",
)
DROP = None
WITH: dict[str, dict[str, str | None]] = {
    "--global-batch-size": {"--rollout-batch-size": "128"},
    "--over-sampling-batch-size": {"--dynamic-sampling-filter-path": "my_project.filters.keep"},
    "--num-epoch": {"--num-rollout": DROP},
    "--custom-rm-path": {"--rm-type": DROP},
    "--loss-type": {"--n-samples-per-prompt": "1", "--eval-prompt-data": DROP, "--eval-interval": DROP,
        "--use-kl-loss": DROP},
    "--disable-compute-advantages-and-returns": {
        "--loss-type": "sft_loss", "--n-samples-per-prompt": "1", "--eval-prompt-data": DROP, "--eval-interval": DROP,
        "--use-kl-loss": DROP,
    },
    "--rollout-function-path": {
        "--loss-type": "sft_loss", "--n-samples-per-prompt": "1", "--eval-prompt-data": DROP, "--eval-interval": DROP,
        "--use-kl-loss": DROP,
    },
    "--debug-train-only": {"--load-debug-rollout-data": "/save/{rollout_id}.pt"},
    "--update-weight-disk-dir": {"--update-weight-transport": "disk"},
    "--update-weight-mode": {"--colocate": DROP, "--rollout-num-gpus": "8"},
    "--update-weight-delta-encoding": {"--update-weight-mode": "delta", "--colocate": DROP, "--rollout-num-gpus": "8"},
    "--update-weight-delta-checksum": {"--update-weight-mode": "delta", "--colocate": DROP, "--rollout-num-gpus": "8"},
    "--update-weight-local-checkpoint-dir": {"--update-weight-mode": "delta", "--colocate": DROP,
        "--rollout-num-gpus": "8"},
    "--overlap-cpu-optimizer-d2h-h2d": {"--optimizer-cpu-offload": ""},
    "--recompute-granularity": {"--recompute-method": "uniform", "--recompute-num-layers": "1"},
    "--recompute-method": {"--recompute-granularity": "full", "--recompute-num-layers": "1"},
    "--recompute-num-layers": {"--recompute-granularity": "full", "--recompute-method": "uniform"},
    "--expert-model-parallel-size": {"--actor-num-nodes": "4", "--num-experts": "160"},
    "--sequence-parallel": {"--tensor-model-parallel-size": "2"},
    "--decoder-last-pipeline-num-layers": {"--pipeline-model-parallel-size": "2"},
    "--decoder-first-pipeline-num-layers": {"--pipeline-model-parallel-size": "2"},
    "--sglang-dp-size": {"--rollout-num-gpus-per-engine": "64", "--sglang-enable-dp-attention": ""},
    "--sglang-ep-size": {"--rollout-num-gpus-per-engine": "64", "--num-experts": "160"},
    "--moe-enable-deepep": {"--moe-token-dispatcher-type": "flex"},
    "--multi-latent-attention": {"--group-query-attention": DROP, "--num-query-groups": DROP},
    "--moe-router-num-groups": {"--moe-router-group-topk": "1"},
}  # fmt: skip


def command_line(flag: str, value: str) -> list[str]:
    """BASE with the flag in it, and with what it needs."""
    chosen = BASE | WITH.get(flag, {})
    if value.endswith("_fully_async"):
        chosen = BASE | {"--colocate": DROP, "--rollout-num-gpus": "8"}
    if flag.startswith("--moe-"):
        chosen |= {"--num-experts": "160"}
    if flag in LATENT:
        chosen |= WITH["--multi-latent-attention"] | {"--multi-latent-attention": ""}
    if flag == "--moe-layer-freq":
        chosen |= {
            "--num-layers": str(len(value.split(",")) if "," in value else sum(map(int, re.findall(r"\*(\d+)", value))))
        }
    chosen[flag] = value
    return shlex.split(" ".join(f"{name} {text}" for name, text in chosen.items() if text is not None)) + ["--plan"]


def problems_of(argv: list[str]) -> list[str]:
    try:
        parse_args(argv)
    except ConfigError as error:
        return error.problems
    return []


def split_line(line: str) -> tuple[str, str]:
    flag, _, value = line.partition(" ")
    return flag, value


def is_refused(flag: str, value: str) -> bool:
    return (
        (flag in REFUSED and flag not in IDLE_WITHOUT)
        or (flag, value) in REFUSED_VALUES
        or flag.removeprefix("--sglang-").replace("-", "_") in RESERVED
    )


@pytest.mark.parametrize("line", LINES)
def test_taken_or_refused_with_an_alternative(line: str):
    flag, value = split_line(line)
    quoted = f"'{value}'" if "{" in value else value
    problems = problems_of(command_line(flag, quoted))
    if is_refused(flag, value):
        assert len(problems) == 1 and problems[0].startswith(f"{flag} "), problems
        assert "Fix: " in problems[0]
    else:
        assert problems == []


def field_owner(name: str) -> str | None:
    return next(
        (group for group, kind in GROUPS.items() if name in {field.name for field in dataclasses.fields(kind)}), None
    )


def is_noticed(flag: str, value: str) -> bool:
    return flag in SAID_ANYWAY or flag in IDLE_WITHOUT or (flag, value) in BUILT_IN


@pytest.mark.parametrize("line", [line for line in LINES if is_noticed(*split_line(line))])
def test_what_is_done_anyway_or_built_in_is_told(line: str):
    notes = parse_args(command_line(*split_line(line))).notes
    shown = line.split()[0] if line.split()[0] in IDLE_WITHOUT else line.strip()
    assert len([note for note in notes if note.startswith(shown)]) == 1, notes


@pytest.mark.parametrize(
    "line", [line for line in LINES if not (is_refused(*split_line(line)) or is_noticed(*split_line(line)))]
)
def test_what_is_taken_arrives(line: str):
    """The value is in the config: ours in its field, SGLang's among the engine's flags."""
    flag, value = split_line(line)
    quoted = f"'{value}'" if "{" in value else value
    config = parse_args(command_line(flag, quoted)).config
    name = flag.removeprefix("--").replace("-", "_")
    switched_off = name.startswith("no_") and field_owner(name) is None
    owner = field_owner(name.removeprefix("no_") if switched_off else name)
    if owner is None:
        engine = present_names({name.removeprefix("sglang_"): value})[0]
        (engine_name,) = engine
        engine_value = config.engine.sglang[engine_name]
        words = engine_value if isinstance(engine_value, list) else [engine_value]
        assert engine_value is True if not value else " ".join(words) == value
        return
    arrived = getattr(getattr(config, owner), name.removeprefix("no_") if switched_off else name)
    if not value:
        assert arrived is not switched_off
    elif isinstance(arrived, list):
        assert " ".join(map(str, arrived)) == value
    else:
        assert arrived == type(arrived)(value)


def test_refusals_are_about_flags_that_are_not_taken():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    # --no-check-… and the like: the positive spelling must not exist either, or argparse would take the negative one.
    assert REFUSED.keys() & known == set()
    assert {flag for flag, _ in REFUSED_VALUES} <= known
    assert all("Fix: " in reason for reason in (*REFUSED.values(), *REFUSED_VALUES.values()))


def test_a_refused_flag_takes_its_values_with_it():
    rest, problems = take_refused(
        [
            "--lr",
            "1",
            "--spec",
            "a.b",
            "get_spec",
            "--swiglu",
            "--dump-details=x",
            "--optimizer=sgd",
            "--seed",
            "2",
        ]
    )
    assert rest == ["--lr", "1", "--swiglu", "--seed", "2"]
    assert [problem.split(" ")[0] for problem in problems] == ["--spec", "--dump-details", "--optimizer"]


def test_refusals_come_with_every_other_problem():
    problems = problems_of([*command_line("--spec", "a.b get_spec"), "--rollout-temperature", "0"])
    assert [problem.split(" ")[0] for problem in problems] == ["--spec", "--rollout-temperature"]
    problems = problems_of([*command_line("--spec", "a.b get_spec"), "--rollout-temperatur", "0"])
    assert "--spec is refused" in problems[0] and "unknown flag --rollout-temperatur" in problems[1]


@pytest.mark.skipif(not known_arguments(), reason="SGLang is not installed: its renamed arguments cannot be told apart")
def test_renamed_arguments_of_sglang_are_taken_with_a_note():
    command = parse_args(command_line("--sglang-cuda-graph-bs", "1 2 4"))
    assert command.config.engine.sglang == {"cuda_graph_bs_decode": ["1", "2", "4"]}
    assert any("--sglang-cuda-graph-bs is called --sglang-cuda-graph-bs-decode" in note for note in command.notes)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--attention-backend", "flash"),
        ("--moe-grouped-gemm", ""),
        ("--sglang-attention-backend", "fa3"),
        ("--sglang-moe-a2a-backend", "deepep"),
    ],
)
def test_kernels_for_gpus_are_a_note(flag: str, value: str):
    notes = parse_args(command_line(flag, value)).notes
    assert any(f"{flag} {value}".strip() in note and "GPU hosts" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"--num-experts": "160"}, "an architecture of no known family"),
        ({"--optimizer-cpu-offload": ""}, "--optimizer-cpu-offload"),
        ({"--rotary-percent": "0.5"}, "an architecture of no known family"),
    ],
)
def test_what_only_the_plan_can_do_is_said(flags: dict[str, str], reason: str):
    argv = shlex.split(" ".join(f"{name} {text}" for name, text in (BASE | flags).items())) + ["--plan"]
    reasons = parse_args(argv).config.not_yet()
    assert len(reasons) == 1 and reason in reasons[0] and "yet" in reasons[0]


def test_other_dispatchers_are_a_note():
    notes = parse_args([*command_line("--moe-enable-deepep", "")]).notes
    assert any(
        "--moe-token-dispatcher-type flex and --moe-enable-deepep" in note and "alltoall" in note for note in notes
    )


def test_qwen3_moe_and_expert_parallelism_can_run():
    flags = {
        "--num-experts": "160",
        "--qk-layernorm": "",
        "--expert-model-parallel-size": "2",
        "--moe-aux-loss-coeff": "0.01",
    }
    argv = shlex.split(" ".join(f"{name} {text}" for name, text in (BASE | flags).items())) + ["--plan"]
    assert parse_args(argv).config.not_yet() == []
    (reason,) = parse_args([*argv, "--moe-router-load-balancing-type", "seq_aux_loss"]).config.not_yet()
    assert "seq_aux_loss" in reason


def test_engines_that_do_not_tie_embeddings_are_refused():
    """SGLang's mixture of experts has an output layer of its own, which no tied checkpoint fills.

    Without engines nothing stands in the way.
    """
    tied = {name: text for name, text in BASE.items() if name != "--untie-embeddings-and-output-weights"} | {
        "--num-experts": "160",
        "--qk-layernorm": "",
    }
    argv = shlex.split(" ".join(f"{name} {text}" for name, text in tied.items())) + ["--plan"]
    (reason,) = parse_args(argv).config.not_yet()
    assert "tied embeddings" in reason and "SGLang" in reason
    assert (
        parse_args(
            [*argv, "--debug-train-only", "--load-debug-rollout-data", "/nowhere/{rollout_id}.npz"]
        ).config.not_yet()
        == []
    )


def test_the_base_can_run():
    assert parse_args(command_line("--lr", "1e-5")).config.not_yet() == []
