"""The parity table against HF transformers: the worst difference of each family and layout, as the tests find them.

usage: parity_table.py [--select REGEX] [--output benchmarks/results/parity.md]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {
    "log_probs": "log-prob",
    "gradient": "any gradient / largest",
    "grad_norm": "gradient norm",
    "loss": "loss",
    "entropy": "entropy",
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", default=".", help="Rows whose name has this regular expression.")
    parser.add_argument("--output", type=Path, help="Write the table here as Markdown.")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.helpers.parity import run_table
    from tests.helpers.parity_rows import all_rows, make_models

    rows = [row for row in all_rows() if re.search(args.select, row.name)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_table(rows, make_models(folder, rows), timeout_s=3600)
    seconds = time.monotonic() - started
    lines = [
        (
            f"{len(rows)} rows in {seconds:.0f} s on a 2-core x86 CPU host, fp32 unless it says bf16. Log-prob:"
            " absolute; the others: relative."
        ),
        "",
    ]
    lines += ["| model | layout | batch | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (3 + len(COLUMNS))]
    for row, results in zip(rows, outcomes, strict=True):
        worst = [max(result[name] for result in results) for name in COLUMNS]
        form = row.format + (", bf16" if row.bf16 else "")
        lines.append(f"| {row.model} | {row.layout} | {form} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
