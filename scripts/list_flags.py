"""Print every flag of train.py with its default, one a line: what tests/unit/flags.txt holds.

usage: list_flags.py > tests/unit/flags.txt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arguments import build_parser


def flag_lines() -> list[str]:
    """Sorted lines such as `--rm-type = None` and `--loss-type = 'policy_loss' {policy_loss, sft_loss}`."""
    return sorted(_line(action) for action in build_parser()._actions if action.dest != "help")


def _line(action: argparse.Action) -> str:
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    value = "(required)" if action.required else repr(action.default)
    return f"{', '.join(action.option_strings)} = {value}{choices}"


if __name__ == "__main__":
    print("\n".join(flag_lines()))
