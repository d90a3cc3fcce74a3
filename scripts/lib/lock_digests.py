"""Writes the digests of what scripts/setup.sh installs on a CPU host, for the Python and the processor that it runs on.

    .venv/bin/python scripts/lib/lock_digests.py        after a change of scripts/requirements/constraints-cpu.txt

pip says which file it would take for each pinned version, and its SHA-256; nothing is installed. torch is left out: it
comes from an index of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
_TIMEOUT_S = 3600


def digests_file() -> Path:
    """Where the digests for this Python and processor are."""
    return REQUIREMENTS / f"hashes-cpu-cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}.txt"


def pins(path: Path) -> list[str]:
    """The lines of a file of exact versions, but for torch's."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "torch=="))]


def lines_of(report: dict) -> list[str]:
    """`name==version --hash=…` of each package in a report of pip's, by name.

    Raises KeyError if an index gave no digest.
    """
    lines = []
    for package in report["install"]:
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{package['metadata']['name']}=={package['metadata']['version']} --hash=sha256:{digest}")
    return sorted(lines, key=str.lower)


def main() -> int:
    """Write the file; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(pins(REQUIREMENTS / "constraints-cpu.txt")) + "\n", encoding="utf-8")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "-r", str(wanted)], timeout=_TIMEOUT_S, check=True
        )
        lines = lines_of(json.loads(report.read_text(encoding="utf-8")))
    head = "# What scripts/setup.sh installs on a CPU host, by digest. Made by scripts/lib/lock_digests.py.\n"
    digests_file().write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{digests_file()}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
