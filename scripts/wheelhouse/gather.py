"""Gathers a complete offline install: chooses the wheels, fetches them, leaves out what is not needed, cuts them into
parts with an installer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from resolve import Closure, Package, Target, WheelhouseError, choose_sglang, closure, download, resolve_for
from wheels import STRIPS, file_digest, installed_bytes, strip_wheel, top_level, write_parts
from wish import Wish, parse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD_TIMEOUT_S = 300
#: Of the gpu extra, what no index has as a wheel.
SOURCE_ONLY = {
    "transformer-engine": (
        "its PyTorch part is source only; build it on the host against its CUDA if you want it (Megatron's own layers"
        " need none)"
    )
}
#: What is imported after the install: distribution -> (module, whether it needs a GPU to be imported).
IMPORTS = {
    "aiohttp": ("aiohttp", False), "flashinfer-python": ("flashinfer", False), "httpx": ("httpx", False),
    "math-verify": ("math_verify", False),
    "megatron-core": ("megatron.core", False), "numpy": ("numpy", False),
    "ray": ("ray", False), "requests": ("requests", False), "safetensors": ("safetensors.torch", False),
    "sglang": ("sglang.srt.server_args", False),
    "sglang-kernel": ("sgl_kernel", True), "sglang-router": ("sglang_router.launch_router", False),
    "slime-like": ("slime_like.config", False),
    "tensorboard": ("tensorboard", False), "torch": ("torch", False), "torchaudio": ("torchaudio", False),
    "torchvision": ("torchvision", False),
    "transformers": ("transformers", False), "xgrammar": ("xgrammar", False),
}  # fmt: skip


def build_own_wheel(folder: Path) -> Path:
    """Build slime_like's wheel from a copy of the sources, so that nothing is left in the checkout."""
    copy = folder / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    shutil.copytree(ROOT / "slime_like", copy / "slime_like", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise WheelhouseError(f"slime_like's own wheel cannot be built:\n{done.stderr[-2000:]}")
    (wheel,) = folder.glob("slime_like-*.whl")
    return wheel


def gpu_extra() -> list[Requirement]:
    """setup.py's `gpu` extra, read from its text: running it would build something."""
    match = re.search(
        r'"gpu": \[(.*?)\]\s*,\n\s*"dev"', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    if not match:
        raise WheelhouseError("setup.py has no `gpu` extra that this program can read.")
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', match.group(1))]


def choose_roots(wish: Wish, folder: Path, notes: list[str], left_out: dict[str, str]) -> list[str]:
    """What is asked for by name: --only, or slime_like's own wheel, torch, and the `gpu` extra in versions that fit
    this torch.
    """
    if wish.only:
        return list(wish.only)
    roots = [str(build_own_wheel(folder)), f"torch=={wish.torch}"]
    for requirement in gpu_extra():
        name = canonicalize_name(requirement.name)
        if name in wish.exclude:
            left_out[name] = "excluded on the command line"
        elif name in SOURCE_ONLY:
            left_out[name] = SOURCE_ONLY[name]
        elif name == "sglang":
            version, passed = choose_sglang(wish.torch, wish.sglang, wish.target, list(wish.index))
            roots.append(f"sglang=={version}")
            notes.extend(f"passed over: sglang {text}" for text in passed)
            if not requirement.specifier.contains(version):
                notes.append(
                    f"conflict: setup.py's gpu extra asks for {requirement}; with torch {wish.torch}, sglang {version}"
                    " is the newest that fits."
                )
        else:
            roots.append(str(requirement))
    return roots


def torch_libraries(packages: dict[str, Package], target: Target) -> frozenset[str]:
    """torch and what it pins to one version (CUDA libraries, triton), with what those need: there wherever this torch
    is.
    """
    if "torch" not in packages:
        return frozenset()
    applicable = [
        r
        for r in map(Requirement, packages["torch"].requires)
        if r.marker is None or r.marker.evaluate(target.environment(""))
    ]
    pinned = [r for r in applicable if any(s.operator == "==" for s in r.specifier)]
    return frozenset({"torch", *closure(packages, pinned, target, frozenset()).required_by})


def check_cuda(packages: dict[str, Package], wish: Wish) -> None:
    """Refuse a torch that is built for another CUDA than was asked for."""
    if wish.only or "torch" not in packages:
        return
    texts = [
        text
        for text in packages["torch"].requires
        if text.startswith(("cuda-toolkit", "nvidia-cublas", "nvidia-cuda-runtime"))
    ]
    versions = {
        match.group(1) for text in texts if (match := re.match(r"(?:cuda-toolkit\S*?==|nvidia-[a-z-]+-cu)(\d+)", text))
    }
    if versions != {str(wish.cuda)}:
        built = f"CUDA {', '.join(sorted(versions))}" if versions else "no CUDA"
        version = packages["torch"].version
        raise WheelhouseError(
            f"torch {version} of this index is built for {built}, not CUDA {wish.cuda}.\n  Fix: --cuda, --torch, or"
            " --index-url with such builds."
        )


def select(
    packages: dict[str, Package], roots: list[Requirement], wish: Wish, left_out: dict[str, str]
) -> tuple[Closure, frozenset[str]]:
    """What is gathered, and what the host provides. Adds to left_out (name -> why)."""
    wrong_cuda = {
        name for name in packages if (m := re.search(r"-cu(1\d)$", name)) and wish.cuda and int(m.group(1)) != wish.cuda
    }
    without = wish.exclude | (frozenset() if wish.keep_all else frozenset(wrong_cuda))
    whole = closure(packages, roots, wish.target, frozenset())
    on_host = torch_libraries(packages, wish.target) if wish.without_torch else frozenset()
    chosen = closure(packages, roots, wish.target, without | on_host)
    for name in sorted(set(whole.required_by) & set(packages)):
        if name in wish.exclude:
            left_out[name] = "excluded on the command line"
        elif name in without:
            left_out[name] = f"made for another CUDA than {wish.cuda}"
        elif name not in chosen.required_by and name not in on_host:
            left_out[name] = f"only needed by {', '.join(whole.required_by[name])}"
    unknown = wish.exclude - set(packages) - set(left_out)
    if unknown:
        raise WheelhouseError(
            f"--exclude {', '.join(sorted(unknown))}: nothing needs that. Fix: its name; canonical names have dashes."
        )
    return (
        Closure(
            {n: p for n, p in chosen.required_by.items() if n in packages and n not in without | on_host},
            chosen.missing,
        ),
        on_host,
    )


def prepare_wheels(
    packages: list[Package], fetched: Path, folder: Path, wish: Wish, required_by: dict[str, tuple[str, ...]]
) -> list[dict]:
    """Strip what is stripped; describe each wheel for the manifest.

    The files to pack lie under `path` (removed by the caller).
    """
    rules = {} if wish.keep_all else {strip.package: strip for strip in STRIPS}
    described = []
    for package in sorted(packages, key=lambda p: p.name):
        path, note = fetched / package.file, None
        if package.name in rules:
            target = folder / package.file
            files = strip_wheel(path, target, rules[package.name].files)
            if files:
                note = {
                    "why": rules[package.name].why,
                    "files": files,
                    "original_sha256": package.sha256,
                    "original_bytes": path.stat().st_size,
                }
                path = target
        digest = file_digest(path)
        if note is None and digest != package.sha256:
            raise WheelhouseError(
                f"{path} is not the wheel that the index has (sha256 {digest}, expected {package.sha256}). Fix: remove"
                " it, and run again."
            )
        described.append({
            "name": package.name, "version": package.version, "file": package.file, "bytes": path.stat().st_size,
            "sha256": digest,
            "installed_bytes": installed_bytes(path), "required_by": list(required_by[package.name]), "stripped": note,
            "path": path,
        })  # fmt: skip
    return described


def imports_of(wheels: list[dict], roots: list[Requirement], wish: Wish) -> list[dict]:
    """What the import check tries: the known modules of what is there, and the packages of each --only."""
    modules = [
        {"wheel": w["name"], "module": IMPORTS[w["name"]][0], "gpu": IMPORTS[w["name"]][1]}
        for w in wheels
        if w["name"] in IMPORTS
    ]
    names = {canonicalize_name(root.name) for root in roots} if wish.only else set()
    others = [w for w in wheels if w["name"] in names and w["name"] not in IMPORTS]
    return modules + [
        {"wheel": w["name"], "module": module, "gpu": False} for w in others for module in top_level(w["path"])
    ]


def gather(wish: Wish) -> dict:
    """Make the output folder, whole or not at all; returns its manifest."""
    wish.output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{wish.output.name}.partial-", dir=wish.output.parent))
    try:
        work, result = partial / "work", partial / "result"
        work.mkdir()
        result.mkdir()
        manifest = fill(wish, work, result)
        result.chmod(0o755)
        result.rename(wish.output)
        return manifest
    finally:
        shutil.rmtree(partial)


def fill(wish: Wish, work: Path, result: Path) -> dict:
    """Everything between the checked command line and the finished folder."""
    notes: list[str] = []
    left_out: dict[str, str] = {}
    index = list(wish.index)
    roots = choose_roots(wish, work, notes, left_out)
    say(
        f"choosing wheels for Python {wish.target.python}" + ("" if wish.only else f", torch {wish.torch}, {roots[-1]}")
    )
    packages, requirements = resolve_for(roots, wish.target, index, wish.exclude)
    check_cuda(packages, wish)
    selection, on_host = select(packages, requirements, wish, left_out)
    chosen = [packages[name] for name in selection.required_by]
    own = [p for p in chosen if p.url.startswith("file:") and (work / p.file).is_file()]
    fetched = wish.cache or work / "fetched"
    say(f"fetching {len(chosen)} wheels")
    download([p for p in chosen if p not in own], fetched, wish.target, index)
    for package in own:
        shutil.copyfile(work / package.file, fetched / package.file)
    (work / "stripped").mkdir()
    wheels = prepare_wheels(chosen, fetched, work / "stripped", wish, selection.required_by)
    say("writing parts")
    parts = write_parts([wheel["path"] for wheel in wheels], result, wish.split_bytes)
    manifest = {
        "format": 1, "python": wish.target.python, "glibc": wish.target.glibc, "machine": "x86_64", "torch": wish.torch,
        "cuda": wish.cuda,
        "split_bytes": wish.split_bytes, "parts": parts, "imports": imports_of(wheels, requirements, wish),
        "wheels": [{key: value for key, value in wheel.items() if key != "path"} for wheel in wheels],
        "host_provides": [{"name": name, "version": packages[name].version} for name in sorted(on_host)],
        "left_out": [{"name": name, "why": why,
            "version": packages[name].version if name in packages else None} for name, why in sorted(left_out.items())],
        "notes": notes,
    }  # fmt: skip
    (result / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name in ("install.py", "check_imports.py"):
        shutil.copyfile(HERE / name, result / name)
    script = (HERE / "install.sh").read_text(encoding="utf-8").replace("@PYTHON@", f"python{wish.target.python}")
    (result / "install.sh").write_text(script, encoding="utf-8")
    (result / "install.sh").chmod(0o755)
    return manifest


def say(text: str) -> None:
    """One line of progress."""
    print(f"wheelhouse: {text}", flush=True)


def summary(manifest: dict, output: Path, seconds: float) -> str:
    """What was made, in a few lines."""
    wheels, parts = manifest["wheels"], manifest["parts"]
    total, largest = sum(p["bytes"] for p in parts) / 1e6, max(p["bytes"] for p in parts) / 1e6
    lines = [
        (
            f"{output}: {len(wheels)} wheels, {total:.0f} MB in {len(parts)} parts of at most {largest:.0f} MB,"
            f" {seconds:.0f} s"
        )
    ]
    for wheel in wheels:
        if wheel["stripped"]:
            note = wheel["stripped"]
            lines.append(
                f"stripped {wheel['name']} {note['original_bytes'] / 1e6:.0f} -> {wheel['bytes'] / 1e6:.0f} MB:"
                f" {note['why']}"
            )
    lines += [f"left out {item['name']}: {item['why']}" for item in manifest["left_out"]]
    if manifest["host_provides"]:
        lines.append("the host must have torch " + manifest["torch"] + " and its libraries")
    return "\n".join(
        f"wheelhouse: {line}"
        for line in [*lines, *manifest["notes"], f"on the host: bash {output.name}/install.sh --venv DIR"]
    )


def main(argv: list[str] | None = None) -> int:
    """Status 0 when made, 2 for what cannot be had (nothing is written then)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the half-written folder is removed
    started = time.monotonic()
    try:
        wish = parse(argv)
        manifest = gather(wish)
    except WheelhouseError as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 2
    print(summary(manifest, wish.output, time.monotonic() - started))
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
