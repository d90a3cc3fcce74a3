"""Chooses what scripts/setup.sh installs on a host, and says why.

Prints name=value lines: set, torch, sglang, transformer_engine, constraints (of the set), host_torch (yes: the
environment is to see the torch that the host has), reason. Status 2 with a message where no set fits. Standard library
only: the interpreter is one that setup.sh has just met.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "requirements" / "sets.toml"
#: Oldest driver for a CUDA major version (NVIDIA's CUDA compatibility table).
_DRIVERS = {13: "580"}


class NoSetError(Exception):
    """No set fits; the message says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Set:
    """A row of the table. cuda: the CUDA major version that its torch is built for; 0: none."""

    name: str
    hosts: str
    torch: str
    sglang: str
    constraints: str
    cuda: int = 0
    transformer_engine: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it is for CUDA."""
        return self.cuda > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What a host has.

    python: such as "3.12"; gpus: as nvidia-smi lists them; driver_cuda: the newest CUDA that the driver speaks, such as
    "13.0", "" if that is not known; torch, torch_cuda: version of the torch that this Python has, and the CUDA that it
    is built for, "" without.
    """

    python: str
    gpus: tuple[str, ...] = ()
    driver_cuda: str = ""
    torch: str = ""
    torch_cuda: str = ""

    def has_torch_of(self, chosen: Set) -> bool:
        """Whether the torch that is installed is the set's: the same release, no preview of it, for the same CUDA."""
        release = self.torch.partition("+")[0]
        return chosen.is_gpu and release == chosen.torch and _major(self.torch_cuda) == chosen.cuda


@dataclasses.dataclass(frozen=True)
class Choice:
    """The set, and why."""

    chosen: Set
    reason: str
    uses_host_torch: bool


def read_table(path: Path = TABLE) -> tuple[list[str], dict[str, Set]]:
    """(the Pythons that the sets are for, the sets by name)."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    sets = {
        name: Set(name=name, **{key.replace("-", "_"): value for key, value in row.items()})
        for name, row in table["sets"].items()
    }
    return table["python"], sets


def choose(host: Host, *, name: str = "", kind: str = "", path: Path = TABLE) -> Choice:
    """The set for a host. name: of a set, asked for by the user; kind: "cpu" or "gpu", likewise; "": by the host.

    Raises NoSetError.
    """
    pythons, sets = read_table(path)
    if host.python not in pythons:
        raise NoSetError(
            f"this is Python {host.python}, and the sets are for {' and '.join(pythons)}.\n"
            f"  Fix: PYTHON=/path/to/python{pythons[-1]} bash scripts/setup.sh"
        )
    if name:
        if name not in sets:
            raise NoSetError(f"--set {name}: there is no such set. Known: {', '.join(sets)}.")
        return _asked(sets[name], host, f"--set {name}")
    wants_gpu = kind == "gpu" or (not kind and bool(host.gpus))
    fitting = [candidate for candidate in sets.values() if candidate.is_gpu == wants_gpu]
    if not wants_gpu:
        return Choice(fitting[0], "--cpu" if kind else "nvidia-smi lists no GPU", False)
    _check_driver(host, fitting[0])
    seen = f"{len(host.gpus)} x {host.gpus[0]}" if host.gpus else "--gpu"
    for candidate in fitting:
        if host.has_torch_of(candidate):
            return Choice(candidate, f"{seen}, and torch {host.torch} for CUDA {host.torch_cuda} is installed", True)
    newest = fitting[-1]
    if not host.torch:
        return Choice(newest, f"{seen}, and Python {host.python} has no torch yet: the newest", False)
    built = f"for CUDA {host.torch_cuda}" if host.torch_cuda else "without CUDA"
    return Choice(newest, f"{seen}, and torch {host.torch} {built} is in no set: the newest, with its own torch", False)


def _asked(chosen: Set, host: Host, asked: str) -> Choice:
    """A set that the user named: taken, whatever the driver says (an image is built on a host without a GPU)."""
    note = "" if host.gpus or not chosen.is_gpu else ", though nvidia-smi lists no GPU here"
    return Choice(chosen, f"{asked}{note}", host.has_torch_of(chosen))


def _check_driver(host: Host, any_set: Set) -> None:
    spoken = _major(host.driver_cuda)
    if spoken is not None and spoken < any_set.cuda:
        raise NoSetError(
            f"this host's driver speaks CUDA {host.driver_cuda}, and every set for GPUs needs CUDA {any_set.cuda}.\n"
            f"  Fix: a driver of version {_DRIVERS[any_set.cuda]} or newer. With NVIDIA's cuda-compat package, or to"
            " try it all the same: bash scripts/setup.sh --set NAME. Without the GPU: bash scripts/setup.sh --cpu"
        )


def _major(version: str) -> int | None:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else None


def main(argv: list[str] | None = None) -> int:
    """Print the choice."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for field in dataclasses.fields(Host):
        option = f"--{field.name.replace('_', '-')}"
        if field.name == "gpus":
            parser.add_argument(option, default="", help="Names, one a line.")
        else:
            parser.add_argument(option, default="")
    parser.add_argument("--set", dest="name", default="")
    parser.add_argument("--kind", choices=("", "cpu", "gpu"), default="")
    options = vars(parser.parse_args(argv))
    name, kind = options.pop("name"), options.pop("kind")
    gpus = tuple(line.strip() for line in options.pop("gpus").splitlines() if line.strip())
    try:
        choice = choose(Host(gpus=gpus, **options), name=name, kind=kind)
    except NoSetError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = choice.chosen
    print(f"set={chosen.name}")
    for key in ("torch", "sglang", "transformer_engine", "constraints"):
        print(f"{key}={getattr(chosen, key)}")
    print(f"host_torch={'yes' if choice.uses_host_torch else 'no'}\nreason={choice.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
