"""Which wheels a target machine needs: pip resolves, and the closure is checked for the target's Python rather than
this one's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

RESOLVE_TIMEOUT_S = 1800
LOOKUP_TIMEOUT_S = 300
#: pip judges markers by the Python it runs on; what the target needs beyond that is asked for again, at most so often.
MAX_ROUNDS = 4
#: The oldest SGLang whose HTTP interface the engine client speaks (it probes for what came later).
SGLANG_FLOOR = "0.5.16"


class WheelhouseError(Exception):
    """A wish that cannot be met, or a package index that does not have it. The message says what to change."""


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for: Linux, x86-64, CPython `python` ("3.12"), glibc "2.35" or newer."""

    python: str
    glibc: str = "2.35"

    @property
    def tag(self) -> str:
        """Such as cp312."""
        return "cp" + self.python.replace(".", "")

    def pip_options(self) -> list[str]:
        """What makes pip choose wheels for the target instead of for this machine.

        pip matches each platform tag literally.
        """
        minor = int(self.glibc.split(".")[1])
        platforms = [f"manylinux_2_{n}_x86_64" for n in range(minor, 4, -1)]
        platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
        options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python]
        return [*options, *(word for platform in platforms for word in ("--platform", platform))]

    def environment(self, extra: str) -> dict[str, str]:
        """The values of environment markers (PEP 508) on the target."""
        return {
            "python_version": self.python, "python_full_version": f"{self.python}.0", "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0", "platform_python_implementation": "CPython",
            "sys_platform": "linux",
            "os_name": "posix", "platform_system": "Linux", "platform_machine": "x86_64", "platform_release": "",
            "platform_version": "", "extra": extra,
        }  # fmt: skip


@dataclass(frozen=True)
class Package:
    """One wheel that was chosen. sha256: of the wheel on the index, lower-case hex."""

    name: str
    version: str
    file: str
    url: str
    sha256: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Closure:
    """What the roots need on the target.

    required_by: name -> those that ask for it; missing: requirements that no package meets.
    """

    required_by: dict[str, tuple[str, ...]]
    missing: tuple[str, ...]


def run_pip(arguments: list[str], *, timeout_s: int) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip. Raises WheelhouseError at the deadline; a non-zero status is the caller's to read."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | {"PIP_PROGRESS_BAR": "off"},
        )
    except subprocess.TimeoutExpired as error:
        raise WheelhouseError(
            f"pip {arguments[0]} was not done after {timeout_s} s (waiting for the package index)."
        ) from error


def read_report(report: dict) -> dict[str, Package]:
    """The packages of pip's installation report, by canonical name. Raises WheelhouseError for one without a digest."""
    packages: dict[str, Package] = {}
    for item in report["install"]:
        meta, source = item["metadata"], item["download_info"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise WheelhouseError(
                f"the package index gives no sha256 for {meta['name']} {meta['version']} ({source['url']})."
            )
        file = unquote(source["url"].split("#")[0].rsplit("/", 1)[-1])
        name = canonicalize_name(meta["name"])
        packages[name] = Package(
            name, meta["version"], file, source["url"], digest, tuple(meta.get("requires_dist", []))
        )
    return packages


def resolve(requirements: list[str], target: Target, index: list[str]) -> dict[str, Package]:
    """Let pip choose one version of everything. index: pip's options for it.

    Raises WheelhouseError that names what cannot be had.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # fast-deps reads what a wheel needs without fetching all of it, where the index has no metadata files.
        arguments = [
            "install",
            "--use-feature=fast-deps",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--target",
            f"{folder}/nothing",
            "--report",
            str(report),
        ]
        done = run_pip([*arguments, *target.pip_options(), *index, *requirements], timeout_s=RESOLVE_TIMEOUT_S)
        if done.returncode:
            raise explain(done.stderr, target, index)
        return read_report(json.loads(report.read_text(encoding="utf-8")))


def explain(stderr: str, target: Target, index: list[str]) -> WheelhouseError:
    """Turn pip's complaint into ours: unknown package, no wheel for the target, or requirements that exclude each
    other.
    """
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line and not line.startswith("WARNING: ")]
    match = re.search(r"No matching distribution found for (.+)", stderr)
    if not match:
        return WheelhouseError("pip cannot choose the packages:\n  " + "\n  ".join(lines[-25:]))
    phrase = match.group(1).strip()
    name = re.split(r"[\s\[<>=!~;(]", phrase)[0]
    # --pre: a package of which there are only pre-releases is not unknown.
    known = run_pip(["index", "versions", "--pre", name, *index], timeout_s=LOOKUP_TIMEOUT_S)
    versions = re.search(r"Available versions: (.+)", known.stdout)
    if known.returncode or not versions:
        return WheelhouseError(
            f"unknown package: the index has nothing called {phrase}. Fix: its name or version, or --exclude {name}."
        )
    return WheelhouseError(
        f"no wheel of {phrase} for Python {target.python} on Linux x86-64 with glibc {target.glibc}: it comes as source"
        f" only, or for others.\n  versions on the index: {versions.group(1)[:200]}\n  Fix: another version, --exclude"
        f" {name}, or build its wheel on such a machine and add --find-links FOLDER."
    )


def closure(packages: dict[str, Package], roots: list[Requirement], target: Target, without: frozenset[str]) -> Closure:
    """Follow requirements from the roots as the target would.

    `without`: names that are neither followed nor reported missing.
    """
    required_by: dict[str, set[str]] = {}
    missing: dict[str, None] = {}
    waiting = [(requirement, "asked for") for requirement in roots]
    followed: set[tuple[str, str]] = set()
    while waiting:
        requirement, parent = waiting.pop()
        name = canonicalize_name(requirement.name)
        required_by.setdefault(name, set()).add(parent)
        package = packages.get(name)
        if name in without:
            continue
        if package is None or not (
            requirement.url or requirement.specifier.contains(Version(package.version), prereleases=True)
        ):
            missing[
                (
                    f"{requirement} (for {parent})"
                    if package
                    else str(Requirement(f"{requirement.name}{_extras(requirement)}{requirement.specifier}"))
                )
            ] = None
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) in followed:
                continue
            followed.add((name, extra))
            for text in package.requires:
                child = Requirement(text)
                if (
                    child.marker is None
                    and extra == ""
                    or child.marker is not None
                    and child.marker.evaluate(target.environment(extra))
                ):
                    waiting.append((child, name))
    return Closure({name: tuple(sorted(parents)) for name, parents in required_by.items()}, tuple(missing))


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def resolve_for(
    roots: list[str], target: Target, index: list[str], without: frozenset[str]
) -> tuple[dict[str, Package], list[Requirement]]:
    """Resolve until the closure holds on the target; returns the packages and the roots as requirements.

    roots: requirements, or paths of wheels. Raises WheelhouseError if something stays missing.
    """
    goals = list(roots)
    for _ in range(MAX_ROUNDS):
        packages = resolve(goals, target, index)
        requirements = [_as_requirement(root) for root in roots]
        missing = closure(packages, requirements, target, without).missing
        if not missing:
            return packages, requirements
        goals += missing
    raise WheelhouseError("requirements that stay unmet on the target: " + "; ".join(missing))


def _as_requirement(root: str) -> Requirement:
    """A wheel's path becomes its name; anything else is a requirement already."""
    return Requirement(Path(root).name.split("-")[0].replace("_", "-")) if root.endswith(".whl") else Requirement(root)


def choose_sglang(torch: str, wish: str | None, target: Target, index: list[str]) -> tuple[str, list[str]]:
    """The newest SGLang whose own pin admits this torch, since its kernels are compiled against that version.

    wish: a version that must be taken. Returns the version, and what each newer one asks for ("0.5.23 needs
    torch==2.14.1"). Raises WheelhouseError if none admits it.
    """
    passed: list[str] = []
    specifier = f"=={wish}" if wish else f">={SGLANG_FLOOR}"
    while True:
        try:
            (package,) = resolve_one(f"sglang{specifier}", target, index)
        except WheelhouseError as error:
            if not passed:
                raise
            raise WheelhouseError(
                f"no sglang from {SGLANG_FLOOR} on admits torch {torch}: {'; '.join(passed)}. Fix: --torch with one of"
                " these."
            ) from error
        pins = [
            r
            for r in map(Requirement, package.requires)
            if r.name == "torch" and (r.marker is None or r.marker.evaluate(target.environment("")))
        ]
        if all(pin.specifier.contains(torch) for pin in pins):
            return package.version, passed
        passed.append(f"{package.version} needs torch{','.join(str(pin.specifier) for pin in pins)}")
        if wish:
            raise WheelhouseError(
                f"sglang {passed[0]}, and its kernels are compiled for it; you asked for torch {torch}. Fix: leave"
                " --sglang out, or --torch."
            )
        specifier = f">={SGLANG_FLOOR},<{package.version}"


def resolve_one(requirement: str, target: Target, index: list[str]) -> tuple[Package, ...]:
    """One package without what it needs."""
    return tuple(resolve([requirement, "--no-deps"], target, index).values())


def download(packages: list[Package], folder: Path, target: Target, index: list[str]) -> None:
    """Fetch the wheels into the folder; pip compares each with its digest. Raises WheelhouseError."""
    folder.mkdir(parents=True, exist_ok=True)
    to_fetch = [p for p in packages if not (folder / p.file).is_file()]
    if to_fetch:
        lock = folder / "lock.txt"
        lock.write_text(
            "".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in to_fetch), encoding="utf-8"
        )
        arguments = [
            "download",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "--dest",
            str(folder),
            "--requirement",
            str(lock),
        ]
        done = run_pip([*arguments, *target.pip_options(), *index], timeout_s=RESOLVE_TIMEOUT_S)
        lock.unlink()
        if done.returncode:
            raise WheelhouseError("pip cannot fetch the wheels:\n  " + "\n  ".join(done.stderr.splitlines()[-15:]))
    absent = [p.file for p in packages if not (folder / p.file).is_file()]
    if absent:
        raise WheelhouseError(f"pip fetched other files than it chose; not there: {', '.join(absent)}.")
