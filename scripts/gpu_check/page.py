"""The page to send back: gpu_report.md for people, gpu_report.json beside it for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ladder import PRETENDED, Outcome


def write_report(outcomes: Sequence[Outcome], host: dict, folder: Path) -> Path:
    """Both files; returns the page's path. host: short facts, name -> value."""
    data = {"format": 1, "host": host, "rungs": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (folder / "gpu_report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = folder / "gpu_report.md"
    page.write_text(render(outcomes, host), encoding="utf-8")
    return page


def render(outcomes: Sequence[Outcome], host: dict) -> str:
    """The page as Markdown."""
    lines = ["# GPU check", ""]
    lines += [f"- {name}: {value}" for name, value in host.items()]
    pretended = [outcome.name for outcome in outcomes if outcome.verdict == PRETENDED]
    if pretended:
        lines += ["", f"**Not on a GPU** (CPU or pretended device): {', '.join(pretended)}."]
    lines += ["", "| rung | verdict | seconds | where | what |", "|---|---|---:|---|---|"]
    lines += [
        f"| {o.title} | {o.verdict} | {o.seconds:.0f} | {o.where or '-'} | {_cell(o.summary)} |" for o in outcomes
    ]
    for outcome in outcomes:
        if outcome.checks or outcome.numbers or outcome.is_bad:
            lines += ["", f"## {outcome.title}", *_details(outcome)]
    bad = [outcome for outcome in outcomes if outcome.is_bad]
    if bad:
        files = ", ".join(f"`{outcome.log}`" for outcome in bad)
        lines += ["", "## What to send back", f"This page, `gpu_report.json`, and {files}."]
    return "\n".join(lines) + "\n"


def _details(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.checks:
        lines += ["", "| number | value | limit | |", "|---|---:|---:|---|"]
        lines += [
            f"| {check['what']} | {check['value']:.4g} | {check['sign']} {check['limit']:.4g} |"
            f" {'ok' if check['ok'] else '**outside**'} |"
            for check in outcome.checks
        ]
    if outcome.numbers:
        lines += ["", *(f"- {name}: {_value(value)}" for name, value in outcome.numbers.items())]
    if outcome.is_bad and outcome.log_tail:
        lines += ["", "```", outcome.log_tail, "```"]
    return lines


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
