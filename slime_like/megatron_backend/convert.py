"""Converts weights between HF folders and Megatron checkpoints, bit for bit, each process holding only its own part.

python -m slime_like.megatron_backend.convert hf-to-mcore --input HF_DIR --output MEGATRON_DIR
python -m slime_like.megatron_backend.convert mcore-to-hf --input MEGATRON_DIR --output HF_DIR --origin-hf-dir HF_DIR

A model that one process cannot hold is converted by several: --nproc 4 --tensor-model-parallel-size 4, or under
torchrun on several machines. The layout only says who holds what meanwhile; the result is read under any other one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time

import torch

from slime_like.config.bounds import bounded
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.errors import CheckpointError, ConfigError, RunError, SlimeLikeError, UserError, WaitTimeout
from slime_like.megatron_backend.checkpoint import state as checkpoint
from slime_like.megatron_backend.checkpoint.async_save import Saver
from slime_like.megatron_backend.checkpoint.folder import find, read_client_state, refuse_existing
from slime_like.megatron_backend.hf.files import HfReader
from slime_like.megatron_backend.hf.names_and_shards import export_hf, load_hf
from slime_like.megatron_backend.hf.save import save_hf_folder
from slime_like.megatron_backend.initialize import initialize, shut_down
from slime_like.megatron_backend.model.provider import build_frozen, unwrap

#: Seconds that all processes of one machine have in all.
_DEADLINE_S = 24 * 3600
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """One conversion. origin_hf_dir: whose config.json and tokenizer the HF folder gets; None: to Megatron.

    dtype: None: the weights' own.
    """

    input: str
    output: str
    origin_hf_dir: str | None = None
    parallel: ParallelConfig = ParallelConfig()
    dtype: str | None = None
    ckpt_step: int | None = None

    @property
    def num_ranks(self) -> int:
        """Processes that the layout needs at least."""
        parallel = self.parallel
        return parallel.pipeline_model_parallel_size * max(
            parallel.tensor_model_parallel_size, parallel.expert_tp_size * parallel.expert_model_parallel_size
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Which process of how many this is, and where they meet: in a private file of one machine, or at an address."""

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    store_path: str | None = None


def convert(job: Conversion, place: Place) -> str:
    """Do one process's part. Collective over the processes of the layout; returns the path of what was written.

    Raises ConfigError for an unknown architecture or layout, CheckpointError for weights that are missing, torn or
    already there.
    """
    to_megatron = job.origin_hf_dir is None
    model, dtype = check(job)
    if place.world_size % job.num_ranks:
        raise ConfigError(
            [
                (
                    f"the layout needs a multiple of {job.num_ranks} processes, and there are {place.world_size}. Fix:"
                    f" --nproc {job.num_ranks}."
                )
            ]
        )
    initialize(job.parallel, **dataclasses.asdict(place))
    try:
        torch.distributed.barrier()  # every rank has seen that the output is free before the first writes
        # Of the optimizer only the weights' data type matters here: nothing is trained.
        stage = build_frozen(model, job.parallel, OptimizerConfig(bf16=dtype == "bfloat16"))
        state = checkpoint.TrainState(model=stage, model_config=model, with_rng=False)
        if to_megatron:
            load_hf(unwrap(stage), model, job.input)
            draft = checkpoint.draft_of(job.output, state, num_rollouts_done=None, client_state={})
            return Saver(in_background=False, seconds=_DEADLINE_S).save(draft, state)
        checkpoint.load(find(job.input, job.ckpt_step), state)
        assert job.origin_hf_dir, "there is a template when the result is an HF folder"
        save_hf_folder(
            lambda: export_hf(unwrap(stage), model), job.output, template=job.origin_hf_dir, dtype=_DTYPES[dtype]
        )
        return job.output
    finally:
        shut_down()


def check(job: Conversion) -> tuple[ModelConfig, str]:
    """(architecture, data type) of a conversion, which is possible as far as small files tell.

    Raises ConfigError or CheckpointError.
    """
    refuse_existing(job.output)
    template = job.origin_hf_dir or job.input
    if not os.path.isfile(os.path.join(template, "config.json")):
        raise CheckpointError(f"{template} is no HF folder: it has no config.json.")
    model = model_from_hf(read_hf_config(template), ModelConfig())
    problems = model.problems() + job.parallel.problems(model)
    if problems:
        raise ConfigError(problems)
    if job.dtype:
        return model, job.dtype
    dtype = (
        HfReader(job.input).dtype()
        if job.origin_hf_dir is None
        else read_client_state(find(job.input, job.ckpt_step)).get("dtype")
    )
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{job.input} holds weights in {dtype or 'an unknown data type'}. Fix: --dtype {' or '.join(_DTYPES)}."
        )
    return model, dtype


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit status, as train.py's: 0 done, 1 a failure while running, 2 the user's
    mistake.
    """
    options = _parser().parse_args(argv)
    sizes = {name: getattr(options, name) for name in _SIZES}
    job = Conversion(
        input=options.input,
        output=options.output,
        origin_hf_dir=getattr(options, "origin_hf_dir", None),
        parallel=ParallelConfig(**{name: size for name, size in sizes.items() if size is not None}),
        dtype=options.dtype,
        ckpt_step=getattr(options, "ckpt_step", None),
    )
    try:
        check(job)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun
            place = _torchrun_place()
            path = convert(job, place)
            if place.rank != 0:
                return 0
        else:
            path = _convert_here(job, options.nproc or job.num_ranks)
    except SlimeLikeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(f"wrote {path}")
    return 0


def _convert_here(job: Conversion, num_processes: int) -> str:
    """Convert in `num_processes` processes of this machine; one is this process itself."""
    if num_processes == 1:
        return convert(job, Place(rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=0))
    with tempfile.TemporaryDirectory(prefix="slime-like-convert-") as folder:  # only we can enter it
        return _convert_together(job, num_processes, os.path.join(folder, "store"))


def _convert_together(job: Conversion, num_processes: int, store_path: str) -> str:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    world = torch.multiprocessing.spawn(
        _convert_in_process, (job, num_processes, store_path, answers), nprocs=num_processes, join=False
    )
    assert world is not None, "spawn(join=False) returns its processes"
    started = time.monotonic()
    try:
        while not world.join(timeout=60.0):  # raises, and ends the others, when one has failed
            waited = time.monotonic() - started
            if waited > _DEADLINE_S:
                for process in world.processes:
                    process.kill()
                raise WaitTimeout(
                    who="the conversion",
                    whom=f"its {num_processes} processes",
                    phase="convert",
                    seconds=waited,
                    last="still running",
                )
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as failure:
        if answers.empty():
            raise RunError(f"a process of the conversion failed: {failure}") from None
        raise answers.get() from None
    return answers.get()


def _convert_in_process(rank: int, job: Conversion, world_size: int, store_path: str, answers) -> None:
    place = Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_address="127.0.0.1",
        master_port=0,
        store_path=store_path,
    )
    try:
        path = convert(job, place)
    except SlimeLikeError as error:
        answers.put(error)
        raise
    if rank == 0:
        answers.put(path)


def _torchrun_place() -> Place:
    """This process among those that torchrun started. Raises ConfigError if it left something out."""
    names = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "master_address": "MASTER_ADDR",
        "master_port": "MASTER_PORT",
    }
    missing = [variable for variable in names.values() if variable not in os.environ]
    if missing:
        raise ConfigError(
            [
                (
                    f"RANK and WORLD_SIZE are set, {', '.join(missing)} not. Fix: start it with torchrun, or unset"
                    " them and use --nproc."
                )
            ]
        )
    values = {name: os.environ[variable] for name, variable in names.items()}
    return Place(
        rank=int(values["rank"]),
        world_size=int(values["world_size"]),
        local_rank=int(values["local_rank"]),
        master_address=values["master_address"],
        master_port=int(values["master_port"]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.megatron_backend.convert",
        description="Convert weights, bit for bit.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="hf-to-mcore|mcore-to-hf")
    to_megatron = commands.add_parser("hf-to-mcore", help="HF folder -> Megatron checkpoint", allow_abbrev=False)
    to_hf = commands.add_parser("mcore-to-hf", help="Megatron checkpoint -> HF folder", allow_abbrev=False)
    to_hf.add_argument(
        "--origin-hf-dir",
        required=True,
        help="HF folder of the same architecture, whose config.json and tokenizer files are taken.",
    )
    to_hf.add_argument(
        "--ckpt-step", type=bounded(int, least=0), help="Which checkpoint of --input. Default: the newest."
    )
    for command in (to_megatron, to_hf):
        command.add_argument("--input", required=True, help="Folder to read.")
        command.add_argument("--output", required=True, help="Folder to write; it must not hold anything.")
        command.add_argument("--dtype", choices=tuple(_DTYPES), help="Data type of the result. Default: the input's.")
        command.add_argument(
            "--nproc",
            type=bounded(int, least=1, most=1_000_000),
            help="Processes on this machine, without torchrun. Default: as many as the layout needs.",
        )
        for name in _SIZES:
            command.add_argument(
                "--" + name.replace("_", "-"),
                type=bounded(int, least=1, most=1_000_000),
                help="As train.py's; only while converting.",
            )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
