"""The memory timeline of a plan as a picture: PNG (needs matplotlib) or one HTML file that needs nothing.

python train.py … --plan json | python -m slime_like.planning.report.picture plan.html
python train.py … --plan json | python -m slime_like.planning.report.picture plan.png
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from typing import Any

from slime_like.errors import UserError
from slime_like.planning.hardware import GIB
from slime_like.planning.report.timeline import LETTERS
from slime_like.utils.files import write_atomic

#: GPUs with the same bytes share one row; of different ones, the fullest are shown.
_ROWS = 12

_COLORS = {
    "weights": "#4c78a8",
    "gradients": "#f58518",
    "copy": "#f2b279",
    "optimizer": "#e45756",
    "activations": "#72b7b2",
    "logits": "#54a24b",
    "kv_cache": "#eeca3b",
    "graphs": "#d6a5c9",
    "work": "#b279a2",
    "buffers": "#9d755d",
    "communication": "#bab0ac",
}
_ENGINE_WEIGHTS = "#9ecae9"


def color(part: str) -> str:
    """One colour for each kind of part, whichever role it belongs to."""
    return _ENGINE_WEIGHTS if part.startswith("engine ") and part.endswith(" weights") else _COLORS[part.split(" ")[-1]]


def rows(plan: dict) -> list[tuple[str, dict]]:
    """[(name, one GPU of `--plan json`)]: GPUs alike to 1/100 GiB in one row, the fullest first."""
    groups: dict[tuple, list[dict]] = {}
    for gpu in plan["memory"]["per_gpu"]:
        groups.setdefault((gpu["fits"], *(round(p["total_bytes"] / GIB, 2) for p in gpu["phases"])), []).append(gpu)
    gpu_rows = []
    for group in sorted(groups.values(), key=lambda group: -group[0]["peak_bytes"])[:_ROWS]:
        first, more = group[0], f" and {len(group) - 1} more alike" if len(group) > 1 else ""
        gpu_rows.append(
            (
                (
                    f"GPU {first['bundle']}{more}: peak {first['peak_bytes'] / GIB:.1f} GiB,"
                    f" {'fits' if first['fits'] else 'does not fit'}"
                ),
                first,
            )
        )
    return gpu_rows


def _parts(phase: dict) -> list[tuple[str, int]]:
    return sorted(phase["bytes"].items(), key=lambda item: (list(LETTERS).index(item[0].split(" ")[-1]), item[0]))


def _names(plan: dict) -> list[str]:
    names = {part for _, gpu in rows(plan) for phase in gpu["phases"] for part in phase["bytes"]}
    return sorted(names, key=lambda part: (list(LETTERS).index(part.split(" ")[-1]), part))


def as_html(plan: dict) -> str:
    """One self-contained page: a block per kind of GPU, a bar per phase, a line where the card ends."""
    limit = plan["memory"]["limit_bytes"]
    largest = max([limit, *(gpu["peak_bytes"] for _, gpu in rows(plan))])
    key = "".join(f'<i style="background:{color(part)}"></i>{html.escape(part)}' for part in _names(plan))
    lines = [
        "<!doctype html><meta charset=utf-8><title>memory of one step</title>",
        (
            "<style>body{font:14px"
            " sans-serif;margin:2em}.bar{position:relative;height:22px;background:#f4f4f4;width:900px;display:flex}"
        ),
        ".bar i{height:100%}.bar b{position:absolute;top:-3px;bottom:-3px;width:2px;background:#000}",
        "td{padding:2px 8px}.key i{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px}</style>",
        f"<h1>Memory of one step: {html.escape(plan['mode'])}, {plan['num_gpus']} GPUs of {limit / GIB:.1f} GiB</h1>",
        f"<p class=key>{key} &nbsp; | the card</p>",
    ]
    for name, gpu in rows(plan):
        lines.append(f"<h3>{html.escape(name)}</h3><table>")
        for phase in gpu["phases"]:
            cells = "".join(
                f'<i style="background:{color(part)};width:{100 * size / largest:.2f}%" title="{html.escape(part)}'
                f' {size / GIB:.2f} GiB"></i>'
                for part, size in _parts(phase)
            )
            end = f'<b style="left:{100 * limit / largest:.2f}%"></b>'
            total = f"{phase['total_bytes'] / GIB:.1f} GiB"
            lines.append(f"<tr><td>{html.escape(phase['name'])}<td><div class=bar>{cells}{end}</div><td>{total}")
        lines.append("</table>")
    lines.append("<p>Weights, gradients and optimizer state are exact, the rest is estimated.</p>")
    return "\n".join(lines) + "\n"


def pyplot_for(path: str) -> Any:
    """matplotlib.pyplot, without a display. Raises UserError, naming the picture at `path`, where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            f"{path}: this picture needs matplotlib, which is not installed ({error}). Fix: pip install matplotlib."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_png(plan: dict, path: str) -> None:
    """The same as a PNG. Raises UserError where matplotlib is missing (an .html name needs it not)."""
    pyplot = pyplot_for(path)
    shown, limit = rows(plan), plan["memory"]["limit_bytes"] / GIB
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(11, 1.2 + 2.1 * len(shown)), squeeze=False, sharex=True)
    for axis, (name, gpu) in zip(axes[:, 0], shown, strict=True):
        for row, phase in enumerate(gpu["phases"]):
            start = 0.0
            for part, size in _parts(phase):
                axis.barh(row, size / GIB, left=start, color=color(part))
                start += size / GIB
        axis.set_yticks(range(len(gpu["phases"])), [phase["name"] for phase in gpu["phases"]])
        axis.invert_yaxis()
        axis.axvline(limit, color="black")
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("GiB (the line is the card)")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color(part)) for part in _names(plan)]
    figure.legend(patches, _names(plan), loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.9 / (1.2 + 2.1 * len(shown)), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str]) -> int:
    """Reads `--plan json` from standard input; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.planning.report.picture",
        description="Draw the memory timeline of a plan.",
        allow_abbrev=False,
    )
    parser.add_argument("output", help="Where to write: a name that ends in .png or .html.")
    output = parser.parse_args(argv).output
    try:
        if not output.endswith((".png", ".html")):
            raise UserError(f"{output}: the name must end in .png or .html.")
        plan = read_plan(sys.stdin.read())
        if output.endswith(".html"):
            write_atomic(output, as_html(plan))
        else:
            draw_png(plan, output)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"written: {output}")
    return 0


def read_plan(text: str) -> dict:
    """The object of `--plan json`.

    Raises UserError if it is none, or has no memory plan because its placement is impossible.
    """
    try:
        plan = json.loads(text)
    except ValueError:
        raise UserError(
            "standard input is no JSON: pipe the output of `python train.py … --plan json` into this command."
        ) from None
    if not isinstance(plan, dict) or not plan.get("memory"):
        problems = "; ".join(plan.get("problems", [])) if isinstance(plan, dict) else ""
        raise UserError(f"the plan has no memory timeline. {problems or 'Is it the output of train.py --plan json?'}")
    return plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
