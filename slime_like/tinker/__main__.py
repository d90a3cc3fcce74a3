"""`python -m slime_like.tinker`: the server."""

import sys

from slime_like.tinker.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
