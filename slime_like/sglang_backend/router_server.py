"""`python -m slime_like.sglang_backend.router_server <sglang-router arguments>`: the real router, with its key from the
environment.

sglang-router 0.3.2 takes its API key on the command line only, where every user of the host would see it.
"""

from __future__ import annotations

import os
import sys

#: Holds the key that clients of the router have to show; it may be absent.
KEY_VARIABLE = "SLIME_LIKE_ROUTER_API_KEY"


def main(argv: list[str]) -> None:
    """Route until ended."""
    from sglang_router.launch_router import launch_router, parse_router_args

    key = os.environ.pop(KEY_VARIABLE, None)
    launch_router(parse_router_args([*argv, *(["--api-key", key] if key else [])]))


if __name__ == "__main__":
    main(sys.argv[1:])
