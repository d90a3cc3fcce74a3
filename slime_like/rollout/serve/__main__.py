"""python -m slime_like.rollout.serve: see standalone.py; --help lists the flags."""

from __future__ import annotations

import asyncio
import sys

from slime_like.errors import UserError
from slime_like.rollout.serve.standalone import read_arguments, serve
from slime_like.utils.logs import start_logging


def main() -> int:
    """Exit status: 0 ended by a signal, 2 the user's mistake."""
    start_logging()
    try:
        config = read_arguments(sys.argv[1:])
        asyncio.run(serve(config, lambda url: print(f"serving {url}/v1", flush=True)))
    except UserError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
