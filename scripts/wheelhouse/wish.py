"""What is wished for: wheelhouse.sh's command line, checked."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from resolve import Target, WheelhouseError

DESCRIPTION = (
    "Gathers a complete offline install: chooses the wheels, fetches them, leaves out what is not needed, cuts them"
    " into parts with an installer."
)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
#: tar writes in blocks of this size; parts smaller than one make no sense.
MIN_SPLIT_BYTES = 10_240
INDEX_OPTIONS = ("--index-url", "--extra-index-url", "--find-links")


@dataclass(frozen=True)
class Wish:
    """The command line, checked."""

    target: Target
    torch: str
    cuda: int
    split_bytes: int
    output: Path
    without_torch: bool
    exclude: frozenset[str]
    only: tuple[str, ...]
    sglang: str | None
    keep_all: bool
    cache: Path | None
    index: tuple[str, ...]


def parse(argv: list[str] | None) -> Wish:
    """Read the command line. Raises WheelhouseError for values that make no sense."""
    parser = argparse.ArgumentParser(prog="wheelhouse.sh", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--python", required=True, help="Python of the target, such as 3.12.")
    parser.add_argument(
        "--torch", default="", help="PyTorch of the target, such as 2.11.0. Needed unless --only is given."
    )
    parser.add_argument(
        "--cuda", type=int, default=0, help="CUDA major version that this PyTorch must be built for, such as 13."
    )
    parser.add_argument(
        "--split",
        default="60M",
        help="Largest size of a part: a number of bytes, or with K, M or G (powers of 1000). Default: 60M.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="Folder to make; must not exist. Default: wheelhouse-py<python>-torch<torch>-cu<cuda>.",
    )
    parser.add_argument(
        "--without-torch",
        action="store_true",
        help="The host has this PyTorch with its CUDA libraries already: leave them out.",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="NAME",
        help="Leave out this package and what only it needs. May be repeated.",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help="Gather these requirements instead of the whole toolkit.",
    )
    parser.add_argument("--sglang", help="Take this SGLang. Default: the newest whose pin admits --torch.")
    parser.add_argument("--glibc", default="2.35", help="glibc of the target. Default: 2.35 (Ubuntu 22.04, Debian 12).")
    parser.add_argument("--keep-all", action="store_true", help="Strip nothing from any wheel.")
    parser.add_argument("--cache", type=Path, help="Keep fetched wheels here and use them again.")
    for option in INDEX_OPTIONS:
        parser.add_argument(option, action="append", default=[], help="For pip.")
    parser.add_argument("--no-index", action="store_true", help="For pip.")
    return check(parser.parse_args(argv))


def check(options: argparse.Namespace) -> Wish:
    """Turn words into values; all problems are listed at once."""
    problems = []
    if not re.fullmatch(r"3\.\d+", options.python):
        problems.append(f"--python {options.python}: expected a version such as 3.12.")
    if not re.fullmatch(r"2\.\d+", options.glibc):
        problems.append(f"--glibc {options.glibc}: expected a version such as 2.35.")
    size = re.fullmatch(r"(\d+)([KMG]?)", options.split)
    split_bytes = int(size.group(1)) * UNITS[size.group(2)] if size else 0
    if split_bytes < MIN_SPLIT_BYTES:
        problems.append(f"--split {options.split}: expected a size of at least {MIN_SPLIT_BYTES} bytes, such as 60M.")
    if not options.only and not (_is_version(options.torch) and options.cuda > 0):
        problems.append(
            "--torch and --cuda are needed for the whole toolkit, such as --torch 2.11.0 --cuda 13 (or --only NAME)."
        )
    only = tuple(word.strip() for value in options.only for word in value.split(",") if word.strip())
    output = options.output or Path(
        f"wheelhouse-py{options.python}" + ("" if only else f"-torch{options.torch}-cu{options.cuda}")
    )
    if output.exists():
        problems.append(f"--output {output} exists. Fix: another folder, or remove it first.")
    if problems:
        raise WheelhouseError("\n  ".join(problems))
    index = [
        word
        for name in INDEX_OPTIONS
        for value in getattr(options, name[2:].replace("-", "_"))
        for word in (name, value)
    ]
    exclude = frozenset(canonicalize_name(name) for name in options.exclude)
    return Wish(
        target=Target(options.python, options.glibc), torch=options.torch, cuda=options.cuda, split_bytes=split_bytes,
        output=output.absolute(),
        without_torch=options.without_torch, exclude=exclude, only=only, sglang=options.sglang,
        keep_all=options.keep_all, cache=options.cache,
        index=(*index, *(["--no-index"] if options.no_index else [])),
    )  # fmt: skip


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False
