"""What each rung of the check does: `rungs.py NAME FOLDER OPTIONS` writes FOLDER/NAME.json, which ladder.judge reads.

A rung ends with an answer, or with an error: its traceback is the end of the log. OPTIONS is JSON: {"device": "cuda" or
"pretend", "gpus", "hf_checkpoint"}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent / "wheelhouse")]

import loops  # noqa: E402
import speed  # noqa: E402
from answers import Answer, at_least, at_most  # noqa: E402
from ladder import SkipRung  # noqa: E402

#: (module, whether a run needs it, whether it needs a GPU to be imported)
MODULES = (
    ("torch", True, False), ("megatron.core", True, False), ("ray", True, False), ("transformers", True, False),
    ("sglang.srt.server_args", True, True), ("sglang_router.launch_router", True, False),
    ("slime_like.megatron_backend.worker", True, False),
    ("slime_like.sglang_backend.cpu_server", False, False),
    ("sgl_kernel", True, True), ("flashinfer", False, True), ("flash_attn", False, True),
    ("transformer_engine.pytorch", False, True), ("torch_memory_saver", False, True),
)  # fmt: skip
#: Relative difference of losses and gradient norms between layouts, in fp32.
LAYOUT_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rung runs: the folder of the report, and what the command line chose."""

    folder: Path
    device: str
    gpus: int
    hf_checkpoint: str | None

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"

    @property
    def where(self) -> str:
        """What a page says of a rung that ran plainly here."""
        return "cuda" if self.on_cuda else "the CPU"


def driver(place: Place) -> Answer:
    """The driver answers, torch sees every GPU, and a product of two matrices is right."""
    if not place.on_cuda:
        raise SkipRung("no GPU here: nothing to ask")
    import torch

    query = "name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    left, right = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    error = ((left @ right).cpu() - left.cpu() @ right.cpu()).abs().max().item()
    numbers: dict = {f"GPU {number} ({query})": line for number, line in enumerate(done.stdout.strip().splitlines())}
    numbers |= {"torch": torch.__version__, "CUDA of torch": torch.version.cuda, "device copy": loops.copy_rate("cuda")}
    numbers |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    numbers |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_"))}
    checks = [at_least("GPUs that torch sees", torch.cuda.device_count(), place.gpus)]
    return Answer(
        f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
        "cuda",
        numbers,
        [*checks, at_most("error of a matrix product", error, 0.1)],
    )


def imports(place: Place) -> Answer:
    """Every package is imported in a process of its own."""
    from check_imports import try_import

    numbers, broken = {}, []
    for module, needed, gpu_only in MODULES:
        if gpu_only and not place.on_cuda:
            continue
        worked, text = try_import(module)
        numbers[module] = text if worked else f"no: {text}" + ("" if needed else " (not needed)")
        if needed and not worked:
            broken.append(module)
    summary = f"{len(numbers)} modules" + (f"; broken: {', '.join(broken)}" if broken else "")
    return Answer(summary, place.where, numbers, [at_most("needed modules that are broken", len(broken), 0)])


def train_step(place: Place) -> Answer:
    """Log-probs, loss and gradient norm of one step, against HF transformers in fp32 on the CPU."""
    import hf_step

    return hf_step.compare(loops.tiny_model(place, "model"), place.on_cuda)


def engine(place: Place) -> Answer:
    """One engine alone: it starts, its log-probs are HF's, and how fast it is."""
    import hf_step

    return hf_step.compare_engine(loops.model_of(place), place.on_cuda, place.folder / "engine-server.log")


def colocate(place: Place) -> Answer:
    """A whole colocated run on one card: memory in each phase against the plan, and both sides' log-probs."""
    return loops.colocated(place)


def ipc(place: Place) -> Answer:
    """Bytes a second of a colocated sync, against a copy on the device."""
    return loops.sync_rate(place, "ipc")


def train_speed(place: Place) -> Answer:
    """Our train step against a bare Megatron loop."""
    return speed.train_step(place)


def generate_speed(place: Place) -> Answer:
    """Generation through driver and router against the bare server."""
    return speed.generate(place)


def broadcast(place: Place) -> Answer:
    """Trainer and engine on a GPU each: a sync by broadcast, proven."""
    return loops.sync_rate(place, "broadcast")


def killed_engine(place: Place) -> Answer:
    """An engine is killed in a run: the run ends in time, names it, and leaves nothing behind."""
    return loops.killed_engine(place)


def parallel(place: Place) -> Answer:
    """Tensor and pipeline parallel of two against one rank, on recorded rollouts."""
    layouts = {"TP2": loops.TP2, "PP2": loops.PP2}
    return _layouts(place, loops.replay(place), {name: loops.replay(place, *flags) for name, flags in layouts.items()})


def transformer_engine(place: Place) -> Answer:
    """TransformerEngine's layers against Megatron's own, on recorded rollouts."""
    from check_imports import try_import

    worked, text = try_import("transformer_engine.pytorch")
    if not worked:
        raise SkipRung(f"transformer_engine cannot be imported: {text}")
    return _layouts(place, loops.replay(place, "--attention-backend", "local"), {"TE": loops.replay(place)})


def experts(place: Place) -> Answer:
    """A mixture of experts: one step against HF, and two ranks that share the experts against one."""
    import hf_step

    answer = hf_step.compare(loops.tiny_model(place, "moe"), place.on_cuda)
    if place.gpus < 2:
        return answer
    moe = ("--hf-checkpoint", "{moe}")
    split = loops.replay(place, *moe, "--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2")
    layouts = _layouts(place, loops.replay(place, *moe), {"EP2": split})
    return dataclasses.replace(
        answer,
        summary=f"{answer.summary}; {layouts.summary}",
        numbers=answer.numbers | layouts.numbers,
        checks=[*answer.checks, *layouts.checks],
    )


def _layouts(place: Place, one: list[dict], others: dict[str, list[dict]]) -> Answer:
    """The first train step of other layouts against that of one."""
    numbers, checks = {}, []
    for name, steps in others.items():
        for metric in ("train/loss", "train/grad_norm"):
            before, after = one[0][metric], steps[0][metric]
            numbers[f"{name} {metric}"] = f"{after:.6g} (one rank {before:.6g})"
            difference = abs(after - before) / max(abs(before), 1e-2)
            checks.append(at_most(f"{name} {metric}, relative difference", difference, LAYOUT_TOLERANCE))
    return Answer(f"{', '.join(others)} equal to one rank", place.where, numbers, checks)


RUNGS: dict[str, Callable[[Place], Answer]] = {
    function.__name__: function
    for function in (
        driver, imports, train_step, engine, colocate, ipc, train_speed, generate_speed,
        broadcast, killed_engine, parallel, transformer_engine, experts,
    )
}  # fmt: skip


def main() -> None:
    """Command line."""
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    try:
        answer = RUNGS[name](Place(folder, options["device"], options["gpus"], options["hf_checkpoint"])).as_json()
    except SkipRung as reason:
        answer = {"skipped": str(reason)}
    (folder / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
