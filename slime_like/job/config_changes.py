"""What of a run's command line is another than when it was last started: --resume auto says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Written into config.json by one start for itself.
_OF_A_START = {"load", "ckpt_step", "resume", "finetune", "no_load_optim", "no_load_rng", "run_dir"}
#: Random states belong to ranks under these.
_LAYOUT = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("actor_num_nodes", "actor_num_gpus_per_node"),
}
_SHOWN_CHARS = 60


def last_config(path: Path) -> dict | None:
    """What a config.json says; None where there is none that can be read, as a run was killed before it had one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def config_changes(before: dict | None, now: dict) -> tuple[str, ...]:
    """Lines for the user; () where nothing changed, or nothing is known.

    Example: ("--resume auto: changed since the last start: --colocate True -> False",)
    """
    if before is None:
        return ()
    old, new = _flat(before), _flat(now)
    names = [name for name in old | new if old.get(name) != new.get(name) and name not in _OF_A_START]
    if not names:
        return ()
    shown = ", ".join(
        f"--{name.replace('_', '-')} {_short(old.get(name))} -> {_short(new.get(name))}" for name in names
    )
    lines = [f"--resume auto: changed since the last start: {shown}"]
    if _LAYOUT & set(names):
        lines.append("--resume auto: in another layout the random states of ranks begin anew; all else goes on")
    return tuple(lines)


def _flat(config: dict) -> dict[str, Any]:
    """Field -> value, of all groups."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value if isinstance(value, dict) and name != "custom" else {name: value}
    return fields


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
