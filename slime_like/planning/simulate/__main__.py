"""`python -m slime_like.planning.simulate`: see command.py."""

import sys

from slime_like.planning.simulate.command import main

sys.exit(main(sys.argv[1:]))
