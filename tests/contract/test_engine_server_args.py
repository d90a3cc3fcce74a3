"""Our reading of SGLang's source finds exactly the arguments that SGLang's own parser has."""

# Covers slime_like.sglang_backend.cpu_compat too, which it does not import itself.

from __future__ import annotations

import json
import subprocess
import sys

from slime_like.sglang_backend.server_args import MANY, ONE, OPTIONAL_SWITCH, RESERVED, SWITCH, known_arguments

DUMP = """
import argparse, json
from slime_like.sglang_backend import cpu_compat
cpu_compat.install()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps({
    option[2:].replace("-", "_"): [
        a.dest, isinstance(a, argparse.BooleanOptionalAction), a.nargs, [str(c) for c in a.choices or []]
    ]
    for a in parser._actions for option in a.option_strings
}))
"""


def test_same_names_kinds_and_choices():
    output = subprocess.run([sys.executable, "-c", DUMP], capture_output=True, text=True, check=True, timeout=60).stdout
    real = json.loads(output.splitlines()[-1])
    known = known_arguments()
    assert set(known) == set(real) and len(real) > 300
    for name, (dest, optional, nargs, choices) in real.items():
        kind = OPTIONAL_SWITCH if optional else SWITCH if nargs == 0 else MANY if nargs in ("*", "+") else ONE
        assert (known[name].field, known[name].kind) == (dest, kind), name
        if known[name].choices:  # those that are written out; a computed list is not known from the source
            assert sorted(known[name].choices) == sorted(choices), name
    assert set(RESERVED) <= {dest for dest, *_ in real.values()}
