"""Proposes layouts that fit: which split of the trainer, which engines, colocated or apart.

    python -m slime_like.planning.advisor.advise --model scripts/models/qwen3-8B.sh --gpus 64 --gpu-memory-gib 80

Every proposal is a RunConfig whose plan was made and fits; the flags printed are those of that config. The order is by
rules of thumb (`cost`), each of which is printed as a reason: nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from slime_like.config.base import add_flags, from_namespace, make_parser, parse
from slime_like.config.bounds import bounded
from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError, UserError
from slime_like.planning.advisor.layouts import Proposal, Request, propose
from slime_like.planning.memory.parameters import model_parameters

_READ_TIMEOUT_S = 10


def read_model(path: str) -> ModelConfig:
    """The architecture of a scripts/models/*.sh file.

    Raises UserError if it cannot be sourced or sets no MODEL_ARGS.
    """
    if not os.path.isfile(path):
        raise UserError(f"--model {path}: no such file. Fix: one of scripts/models/*.sh.")
    try:
        result = subprocess.run(
            ["bash", "-c", 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"', "bash", path],
            capture_output=True, text=True, check=False, timeout=_READ_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"--model {path}: sourcing it took more than {_READ_TIMEOUT_S} s.") from None
    words = [word for word in result.stdout.split("\0") if word]
    if result.returncode or not words:
        raise UserError(f"--model {path}: bash set no MODEL_ARGS. {result.stderr.strip()}")
    parser = make_parser("")
    add_flags(parser, ModelConfig)
    model = from_namespace(ModelConfig, parse(parser, words))
    if not model.is_known:
        raise UserError(f"--model {path}: MODEL_ARGS has no --num-layers.")
    if problems := model.problems():
        raise ConfigError(problems)
    return model


def render(request: Request, proposals: list[Proposal], *, top: int) -> str:
    """The answer as text."""
    size = model_parameters(request.model)
    lines = [
        (
            f"{size / 1e9:.2f} billion parameters, {2 * size / 1e9:.1f} GB in bf16; {request.gpus} GPUs of"
            f" {request.gpu_memory_gib:g} GiB"
        ),
        "",
    ]
    if not proposals:
        return "\n".join([*lines, *request.why_nothing()])
    for number, proposal in enumerate(proposals[:top], 1):
        lines.append(f"{number}. {proposal.title}")
        lines += [f"   {reason}" for reason in proposal.reasons()]
        lines += ["   " + line for line in proposal.flag_lines()] + [""]
    lines.append('Paste the flags after: python train.py "${MODEL_ARGS[@]}" … --plan')
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command line; returns 0 where something fits, 1 where nothing does, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.planning.advisor.advise", description="Propose layouts that fit.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="A file like scripts/models/qwen3-8B.sh, which sets MODEL_ARGS.")
    parser.add_argument(
        "--gpus", type=bounded(int, least=1, most=1_000_000), required=True, help="GPUs of the whole run."
    )
    parser.add_argument(
        "--gpu-memory-gib",
        type=bounded(float, above=0, most=1_000_000),
        default=80.0,
        help="Memory of one GPU, in GiB.",
    )
    parser.add_argument(
        "--gpus-per-node", type=bounded(int, least=1, most=1_000_000), default=8, help="GPUs of a machine."
    )
    parser.add_argument(
        "--max-tokens-per-gpu", type=bounded(int, least=1), default=8192, help="Tokens of a micro-batch."
    )
    parser.add_argument(
        "--max-response-len", type=bounded(int, least=1), default=8192, help="Longest answer, in tokens."
    )
    parser.add_argument("--top", type=bounded(int, least=1), default=4, help="Proposals to print.")
    options = parser.parse_args(argv)
    try:
        request = Request(
            model=read_model(options.model), gpus=options.gpus, gpu_memory_gib=options.gpu_memory_gib,
            gpus_per_node=options.gpus_per_node,
            max_tokens_per_gpu=options.max_tokens_per_gpu, max_response_tokens=options.max_response_len,
        )  # fmt: skip
        request.check()
        proposals = propose(request)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(render(request, proposals, top=options.top))
    return 0 if proposals else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
