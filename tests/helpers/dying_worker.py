"""Serves as rewards/worker.py does; kind "kills" ends it always, "kills once" the first time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Answer until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kind, mark = json.loads(line)["kind"], Path(os.environ["DYING_WORKER_FOLDER"]) / "killed"
        if kind == "kills" or kind == "kills once" and not mark.exists():
            mark.touch(exist_ok=kind != "kills once")
            if kind == "kills":
                mark.unlink()
            os.kill(os.getpid(), 9)
        print(json.dumps({"reward": 1}), flush=True)


if __name__ == "__main__":
    main()
