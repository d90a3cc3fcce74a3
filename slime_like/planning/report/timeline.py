"""A memory plan as text: one bar per phase, the verdict, and what would make it fit."""

from __future__ import annotations

from slime_like.planning.hardware import GIB
from slime_like.planning.memory.by_phase import GpuMemory, MemoryPlan, PhaseMemory

#: Columns of a bar that is exactly as long as the card is large.
_WIDTH = 48

#: Kinds of GPUs that are shown.
_BLOCKS = 8

#: One letter for each part, in the order in which a bar shows them; a part's last word decides.
LETTERS = {
    "weights": "W",
    "gradients": "G",
    "copy": "G",
    "optimizer": "O",
    "activations": "A",
    "logits": "L",
    "kv_cache": "K",
    "graphs": "g",
    "work": "E",
    "buffers": "B",
    "communication": "c",
}


def letter(part: str) -> str:
    """`critic weights` -> W; engine weights are e, so that they are told from the trainer's."""
    return "e" if part.startswith("engine ") and part.endswith(" weights") else LETTERS[part.split(" ")[-1]]


def render_memory(plan: MemoryPlan) -> str:
    """Several lines for a terminal; GPUs with the same bytes share one block."""
    lines = [
        (
            f"memory of one step (cards of {plan.limit_bytes / GIB:.1f} GiB; weights, gradients, optimizer exact,"
            " the rest estimated)"
        )
    ]
    groups = _alike(plan.per_gpu)
    for gpus in groups[:_BLOCKS]:
        first = gpus[0]
        lines += [
            "",
            f"  {_names(gpus)}: peak {first.peak_bytes / GIB:.1f} GiB, {'fits' if first.fits else 'DOES NOT FIT'}",
        ]
        lines += [_bar(phase, plan.limit_bytes) for phase in first.phases]
        if first.host_bytes:
            lines.append(f"    host     {first.host_bytes / GIB:.1f} GiB in the host's memory for each of them")
    if len(groups) > _BLOCKS:
        lines += ["", f"  and {sum(map(len, groups[_BLOCKS:]))} GPUs with lower peaks"]
    if plan.mem_fraction_static is not None:
        lines += [
            "",
            (
                f"  engines start with --sglang-mem-fraction-static {plan.mem_fraction_static:g} of what is free then:"
                " derived, as the flag is not given"
            ),
        ]
    lines += ["", "  " + legend(plan)]
    if plan.advice:
        lines += ["", "  it would fit with one or more of:"] + [f"    {advice}" for advice in plan.advice]
    return "\n".join(lines)


def legend(plan: MemoryPlan) -> str:
    """`W weights  O optimizer …`, only what occurs."""
    parts = dict.fromkeys(
        part for gpu in plan.per_gpu[:1] + plan.per_gpu[-1:] for phase in gpu.phases for part in phase.bytes
    )
    return "  ".join(f"{letter(part)} {part}" for part in sorted(parts, key=_order)) + "  | the card"


def _order(part: str) -> tuple[int, str]:
    return list(LETTERS).index(part.split(" ")[-1]), part


def _bar(phase: PhaseMemory, limit: int) -> str:
    """`    train    WWWGGGOOO······|  54.3 GiB`; what goes over the card stands behind the bar's end."""
    text, filled, total = "", 0, 0
    for part in sorted(phase.bytes, key=_order):
        total += phase.bytes[part]
        columns = round(total / limit * _WIDTH) - filled
        text += letter(part) * columns
        filled += columns
    text = text[:_WIDTH].ljust(_WIDTH, "·") + "|" + text[_WIDTH : 2 * _WIDTH]
    return f"    {phase.name:<9}{text}  {phase.total_bytes / GIB:.1f} GiB"


def _alike(gpus: tuple[GpuMemory, ...]) -> list[list[GpuMemory]]:
    """Runs of GPUs whose phases agree to 1/100 GiB (padding makes data parallel ranks differ by bytes), the fullest
    first.
    """
    groups: dict[tuple, list[GpuMemory]] = {}
    for gpu in gpus:
        key = (gpu.fits, *(round(phase.total_bytes / GIB, 2) for phase in gpu.phases))
        groups.setdefault(key, []).append(gpu)
    return sorted(groups.values(), key=lambda group: (group[0].fits, -group[0].peak_bytes))


def _names(gpus: list[GpuMemory]) -> str:
    """`GPUs 0-3, 8`."""
    spans: list[list[int]] = []
    for gpu in gpus:
        if spans and gpu.bundle == spans[-1][1] + 1:
            spans[-1][1] = gpu.bundle
        else:
            spans.append([gpu.bundle, gpu.bundle])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    more = f" and {len(text) - 8} more runs" if len(text) > 8 else ""
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(text[:8])}{more}"
