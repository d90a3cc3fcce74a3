"""`python -m slime_like.tinker.store upgrade --db URL`: bring a database's tables to what this version wants."""

from __future__ import annotations

import argparse
import sys

from slime_like.errors import UserError
from slime_like.tinker.store.database import upgrade


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slime_like.tinker.store", description=__doc__, allow_abbrev=False)
    command = parser.add_subparsers(dest="command", required=True).add_parser("upgrade", allow_abbrev=False)
    command.add_argument("--db", required=True, help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/NAME")
    options = parser.parse_args(arguments)
    try:
        upgrade(options.db)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
