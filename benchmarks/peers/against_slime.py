"""slime's rollout driver and ours on the same scripted engine, in turns: from drawing prompts to scored samples.

usage: python -m benchmarks.peers.against_slime --slime CHECKOUT [--samples 1000 10000] [--turns 3] [--output FILE.json]

CHECKOUT: a checkout of slime, from which `slime.rollout.sglang_rollout` is run as it is. What needs a GPU or packages
that are not here is replaced, in its favour: images, evaluation data, reward rules (ours costs nothing: equality of two
strings), and the engines' addresses for ending requests, of which none is left. Samples of 512 tokens in groups of
eight, an engine that answers at once in a process of its own, 512 requests at a time, connections open before the clock
starts. Ours (benchmarks/rollout_driver.py) is measured up to the trainer's records, with advantages; slime's up to its
samples. CPU is user and system time of the driver's process; medians over the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from rollout_driver import GROUP, TINY, TOKENS, WARM_UP, Meter, parse_us, row_of, run_config, serve  # noqa: E402
from step_phases import hardware_name  # noqa: E402

from slime_like.config.run import RunConfig  # noqa: E402

GOAL = 3.0
_DEADLINE_S = 1800.0


def stub_modules(tokenizer: object) -> None:
    """What slime's driver imports and this work does not need."""

    async def reward(args: object, sample: types.SimpleNamespace, **_) -> float:
        return float(sample.response.strip() == sample.label)

    async def rewards(args: object, samples: list, **_) -> list[float]:
        return [await reward(args, sample) for sample in samples]

    stubs: dict[str, dict[str, object]] = {
        "slime.utils.processing_utils": {
            "load_tokenizer": lambda *_, **__: tokenizer,
            "load_processor": lambda *_, **__: None,
            "build_processor_kwargs": None,
            "encode_image_for_rollout_engine": None,
        },
        "slime.utils.data": {"Dataset": None},
        "slime.utils.eval_config": {"EvalDatasetConfig": object},
        "slime.rollout.rm_hub": {"async_rm": reward, "batched_async_rm": rewards},
    }
    if "pybase64" not in sys.modules:
        stubs["pybase64"] = {}
    for name, content in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def slime_arguments(url: str) -> argparse.Namespace:
    """Its flags; those that are not here are None."""

    class Flags(argparse.Namespace):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    place = urlsplit(url)
    return Flags(
        hf_checkpoint=str(TINY), sglang_router_ip=place.hostname, sglang_router_port=place.port, rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1, sglang_server_concurrency=RunConfig().engine.sglang_server_concurrency,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=TOKENS,
        rollout_skip_special_tokens=True, n_samples_per_prompt=GROUP, rollout_global_dataset=True,
        sglang_router_policy="cache_aware",
    )  # fmt: skip


def prompts_of(folder: Path, tokenizer: object) -> list[tuple[str, str]]:
    """(text with the chat template, label) of the rows that our driver draws from."""
    rows = Path(str(run_config(folder, num_groups=1, group=GROUP).data.prompt_data)).read_text().splitlines()
    apply: Callable = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    return [
        (apply([{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True), row["label"])
        for row in map(json.loads, rows)
    ]


def slime_row(checkout: str, url: str, samples: int) -> dict:
    """A row as rollout_driver.py makes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    sys.path.insert(0, checkout)
    stub_modules(tokenizer)
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils
    from slime.utils.async_utils import run
    from slime.utils.types import Sample

    async def abort(*_) -> list:
        return []

    sglang_rollout.abort = abort
    args = slime_arguments(url)
    with tempfile.TemporaryDirectory() as folder:
        prompts = prompts_of(Path(folder), tokenizer)
    rows = [Sample(prompt=text, label=label) for text, label in prompts]
    drawn = 0

    def draw(count: int) -> list[list]:
        nonlocal drawn
        groups = []
        for _ in range(count):
            group = [copy.deepcopy(rows[drawn % len(rows)]) for _ in range(GROUP)]
            for number, sample in enumerate(group):
                sample.group_index, sample.index = drawn, drawn * GROUP + number
            groups.append(group)
            drawn += 1
        return groups

    def rollout(count: int) -> list:
        args.rollout_batch_size = args.over_sampling_batch_size = count // GROUP
        return run(sglang_rollout.generate_rollout_async(args, 0, draw))[0].samples

    http_utils.init_http_client(args)
    rollout(WARM_UP)
    before = parse_us()
    meter = Meter(resource.RUSAGE_SELF)
    groups = rollout(samples)
    row = meter.read(samples) | {"parse_us": (before + parse_us()) / 2}
    whole = [sample for group in groups for sample in group if len(sample.rollout_log_probs) == TOKENS]
    if len(whole) != samples or any(sample.reward is None for sample in whole):
        raise SystemExit(f"against_slime: {len(whole)} whole samples of {samples}")
    return row


def _run(pipe, *args) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # its progress bar
        pipe.send(slime_row(*args))


def their_row(checkout: str, samples: int) -> dict:
    """One row, in a process of its own with an engine of its own."""
    spawn = multiprocessing.get_context("spawn")
    (engine_end, engine_child), (row_end, row_child) = spawn.Pipe(), spawn.Pipe()
    engine = spawn.Process(target=serve, args=(engine_child,), kwargs={"hang": False}, daemon=True)
    engine.start()
    driver = spawn.Process(target=_run, args=(row_child, checkout, engine_end.recv(), samples), daemon=True)
    try:
        driver.start()
        row_child.close()
        if not row_end.poll(_DEADLINE_S):
            raise SystemExit(f"against_slime: {samples} samples took longer than {_DEADLINE_S:g} s")
        return row_end.recv()
    except EOFError:
        raise SystemExit("against_slime: slime's driver ended without a result") from None
    finally:
        for process in (driver, engine):
            process.kill()
            process.join(timeout=10)


def compare(checkout: str, samples: int, turns: int) -> dict:
    """Both, in turns: ours, theirs, theirs, ours, …"""
    rows: dict[str, list[dict]] = {"ours": [], "slime": []}
    for turn in range(turns):
        for who in ("ours", "slime") if turn % 2 == 0 else ("slime", "ours"):
            row = row_of("driver", samples) if who == "ours" else their_row(checkout, samples)
            rows[who].append(row)
            print(f"{who}: {row['cpu_us']:.0f} us of CPU a sample, {row['per_second']:.0f} a second", file=sys.stderr)
    median = {
        who: {name: statistics.median(row[name] for row in own) for name in ("cpu_us", "per_second", "parse_us")}
        for who, own in rows.items()
    }
    return {
        "samples": samples,
        "ours": median["ours"],
        "slime": median["slime"],
        "ratio": median["ours"]["per_second"] / median["slime"]["per_second"],
        "cpu_ratio": median["slime"]["cpu_us"] / median["ours"]["cpu_us"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slime", required=True, help="A checkout of slime.")
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = {
        "what": "driver",
        "hardware": hardware_name(),
        "goal": GOAL,
        "rows": [compare(options.slime, samples, options.turns) for samples in options.samples],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
