"""Imports what was installed, each module in a process of its own; what needs a GPU only where there is one.

Standard library only.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

IMPORT_TIMEOUT_S = 300
HERE = Path(__file__).resolve().parent
CODE = (
    "import importlib, sys; module = importlib.import_module(sys.argv[1]); print(getattr(module, '__version__', '')"
    " or '')"
)


def has_gpu():
    """Whether nvidia-smi lists a GPU."""
    try:
        return bool(
            subprocess.run(
                ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=60
            ).stdout.strip()
        )
    except FileNotFoundError:
        return False


def try_import(module):
    """(whether it worked, version or the end of the error)."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        command = [sys.executable, "-c", CODE, module]
        done = subprocess.run(
            command, capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False, env=environment, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {IMPORT_TIMEOUT_S} s"
    output = (done.stdout if done.returncode == 0 else done.stderr).decode(errors="replace").strip().splitlines() or [
        ""
    ]
    return done.returncode == 0, output[-1]


def main():
    """Status 1 if a module cannot be imported."""
    imports = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))["imports"]
    gpu, failed = has_gpu(), 0
    for item in imports:
        if item["gpu"] and not gpu:
            print(f"import {item['module']:28s} skipped: needs a GPU")
            continue
        started = time.monotonic()
        worked, text = try_import(item["module"])
        failed += not worked
        print(
            f"import {item['module']:28s} {'ok' if worked else 'FAILED:'} {text} ({time.monotonic() - started:.1f} s)",
            flush=True,
        )
    print(
        f"imports: {failed} of {len(imports)} failed" if failed else "imports: all that can be imported here work",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
