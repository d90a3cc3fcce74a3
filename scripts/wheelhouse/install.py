"""Installs the wheelhouse that it lies in.

Standard library only; older Pythons can read it too, to be told which one is needed.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

BLOCK_BYTES = 1 << 20
#: Unpacking 200 wheels with gigabytes of libraries on a slow disk.
PIP_TIMEOUT_S = 3600
SHORT_TIMEOUT_S = 120
HERE = Path(__file__).resolve().parent


class InstallError(Exception):
    """What is missing, corrupt or does not fit. Nothing was installed."""


class JoinedParts(io.RawIOBase):
    """The parts, read one after another as if they were one file."""

    def __init__(self, paths):
        super().__init__()
        self._paths, self._file = list(paths), None

    def readable(self):
        """It can be read."""
        return True

    def read(self, size=-1):
        """At most `size` bytes; none at the end of the last part."""
        while True:
            if self._file is None:
                if not self._paths:
                    return b""
                self._file = open(self._paths.pop(0), "rb")
            data = self._file.read(size)
            if data:
                return data
            self._file.close()
            self._file = None


def read_manifest():
    """The manifest beside this file. Raises InstallError if there is none, or one of a later format."""
    path = HERE / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InstallError("missing: manifest.json. Fix: carry the whole folder over.") from error
    except ValueError as error:
        raise InstallError(f"corrupt: manifest.json ({error}). Fix: carry it over again.") from error
    if manifest.get("format") != 1:
        raise InstallError(f"manifest.json has format {manifest.get('format')!r}, this installer reads 1.")
    return manifest


def check_parts(manifest):
    """Compare every part with its size and sha256. Raises InstallError that names all that are missing or corrupt."""
    problems = []
    for part in manifest["parts"]:
        path = HERE / part["name"]
        if not path.is_file():
            problems.append(f"missing: {part['name']}")
        elif path.stat().st_size != part["bytes"]:
            problems.append(f"corrupt: {part['name']} has {path.stat().st_size} bytes, expected {part['bytes']}")
        elif file_digest(path) != part["sha256"]:
            problems.append(f"corrupt: {part['name']} has another sha256 than in the manifest")
    if problems:
        head = f"{len(problems)} of {len(manifest['parts'])} parts cannot be used:"
        raise InstallError("\n  ".join([head, *problems, "Fix: carry these over again."]))


def file_digest(path):
    """sha256 of a file, lower-case hex."""
    digest = hashlib.sha256()
    with open(str(path), "rb") as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def join(manifest, folder):
    """Read the wheels out of the joined parts, comparing each with its sha256.

    Write them into `folder` unless it is None.
    """
    expected = {wheel["file"]: wheel for wheel in manifest["wheels"]}
    with tarfile.open(mode="r|", fileobj=JoinedParts(HERE / part["name"] for part in manifest["parts"])) as archive:
        for member in archive:
            wheel = expected.pop(member.name, None)
            if wheel is None or not member.isfile():
                raise InstallError(f"the parts hold {member.name!r}, of which the manifest knows nothing.")
            copy_wheel(archive.extractfile(member), wheel, folder)
    if expected:
        raise InstallError(f"missing from the parts: {', '.join(sorted(expected))}")


def copy_wheel(source, wheel, folder):
    """Copy one wheel out of the archive. Raises InstallError if its digest differs."""
    digest, out = hashlib.sha256(), open(str(folder / wheel["file"]), "wb") if folder else None
    try:
        for block in iter(lambda: source.read(BLOCK_BYTES), b""):
            digest.update(block)
            if out:
                out.write(block)
    finally:
        if out:
            out.close()
    if digest.hexdigest() != wheel["sha256"]:
        raise InstallError(f"corrupt: {wheel['file']} has another sha256 than in the manifest")


def check_host(manifest, python):
    """The interpreter's version, the processor and the C library must be those that the wheels are for."""
    actual = ask(python, "import sys; print('%d.%d' % sys.version_info[:2])")
    if actual != manifest["python"]:
        needs = manifest["python"]
        raise InstallError(
            f"these wheels are for Python {needs}, {python} is Python {actual}. Fix: PYTHON=/path/to/python{needs}"
            " bash install.sh …"
        )
    if sys.platform != "linux" or platform.machine() != manifest["machine"]:
        raise InstallError(
            f"these wheels are for Linux on {manifest['machine']}, this is {sys.platform} on {platform.machine()}."
        )
    name, version = platform.libc_ver()
    if name == "glibc" and number(version) < number(manifest["glibc"]):
        raise InstallError(
            f"these wheels may need glibc {manifest['glibc']}, this host has {version}. Fix: gather again with --glibc"
            f" {version}."
        )


def torch_of(python):
    """(version, folder) of the torch that this interpreter sees; two empty words if there is none."""
    code = (
        "from importlib import metadata as m; d = next((d for d in m.distributions() if (d.metadata['Name'] or"
        " '').lower() == 'torch'), None); print(d.version + ' ' + str(d.locate_file('')) if d else ' ')"
    )
    version, _, folder = ask(python, code).partition(" ")
    return version, folder


def check_torch(manifest, python):
    """Where torch is to come from the host, it must be there in the version that the wheels were chosen for."""
    if not manifest["host_provides"]:
        return
    actual, _ = torch_of(python)
    if actual.split("+")[0] != manifest["torch"].split("+")[0]:
        has = f"torch {actual}" if actual else "none"
        raise InstallError(
            f"these wheels go with torch {manifest['torch']} of the host, but {python} has {has}.\n"
            "  Fix: install that torch there, or gather again without --without-torch."
        )


def see_host(manifest, venv):
    """Let a new virtual environment see the host's torch if the host's Python is one itself: --system-site-packages
    looks past that.
    """
    python = venv / "bin" / "python"
    if manifest["host_provides"] and not torch_of(python)[0]:
        site = ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(site) / "zz_host_packages.pth").write_text(torch_of(sys.executable)[1] + "\n", encoding="utf-8")


def number(version):
    """2.35 -> (2, 35)."""
    return tuple(int(piece) for piece in version.split(".")[:2])


def ask(python, code):
    """What the interpreter prints."""
    return (
        subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, check=True, timeout=SHORT_TIMEOUT_S)
        .stdout.decode()
        .strip("\n")
    )


def check_space(manifest, place):
    """Room for the wheels beside what is installed from them."""
    needed = sum(wheel["bytes"] + wheel["installed_bytes"] for wheel in manifest["wheels"])
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(str(place)).free
    if free < needed:
        raise InstallError(f"needs {needed / 1e9:.1f} GB at {place}, {free / 1e9:.1f} GB are free.")


def make_venv(manifest, venv):
    """A virtual environment, seeing the host's packages if torch is among those."""
    command = (
        [sys.executable, "-m", "venv"] + (["--system-site-packages"] if manifest["host_provides"] else []) + [str(venv)]
    )
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SHORT_TIMEOUT_S * 5, check=False
    )
    if done.returncode:
        raise InstallError(f"no virtual environment can be made:\n{done.stdout.decode(errors='replace')[-1500:]}")


def run_pip(manifest, python, folder):
    """pip, from the folder alone: no index, no configuration, no cache, every file compared with its digest."""
    lock = folder / "requirements.txt"
    lock.write_text(
        "".join(f"{w['name']}=={w['version']} --hash=sha256:{w['sha256']}\n" for w in manifest["wheels"]),
        encoding="utf-8",
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment.update(
        PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PYTHONNOUSERSITE="1"
    )
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-cache-dir",
        "--require-hashes",
    ]
    done = subprocess.run(
        command + ["--find-links", str(folder), "--requirement", str(lock)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PIP_TIMEOUT_S, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise InstallError(f"pip failed:\n{done.stdout.decode(errors='replace')[-3000:]}")


def install(manifest, venv):
    """Into the virtual environment, or this interpreter.

    A virtual environment that was made for it goes again if it fails.
    """
    new = venv is not None and not (venv / "bin" / "python").exists()
    if new and venv.exists() and any(venv.iterdir()):
        raise InstallError(f"{venv} exists and is no virtual environment. Fix: another folder.")
    python = Path(sys.executable) if venv is None or new else venv / "bin" / "python"
    check_host(manifest, python)
    check_torch(manifest, python)
    parent = venv.parent if venv else Path(tempfile.gettempdir())
    check_space(manifest, parent)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".wheels-", dir=str(parent)))
    try:
        join(manifest, folder)
        if new:
            make_venv(manifest, venv)
            python = venv / "bin" / "python"
        run_pip(manifest, python, folder)
        if new:
            see_host(manifest, venv)
    except BaseException:
        if new and venv.exists():
            shutil.rmtree(str(venv))
        raise
    finally:
        shutil.rmtree(str(folder))
    return python


def main():
    """Status 0 when installed (or, with --verify-only, intact), 2 if nothing was installed, 1 if something that was
    installed cannot be imported.
    """
    parser = argparse.ArgumentParser(prog="install.sh", description="Installs this wheelhouse without a network.")
    parser.add_argument(
        "--venv",
        type=Path,
        help="Virtual environment to install into; made if it is not there. Default: this interpreter.",
    )
    parser.add_argument("--verify-only", action="store_true", help="Only compare everything with its digest.")
    parser.add_argument("--no-import-check", action="store_true", help="Do not import anything afterwards.")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half-installed is removed
    started = time.monotonic()
    try:
        manifest = read_manifest()
        check_parts(manifest)
        if options.verify_only:
            join(manifest, None)
            print(
                f"install: {len(manifest['parts'])} parts and {len(manifest['wheels'])} wheels are intact"
                f" ({time.monotonic() - started:.0f} s)"
            )
            return 0
        python = install(manifest, options.venv.absolute() if options.venv else None)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 2
    print(f"install: {len(manifest['wheels'])} wheels into {python} ({time.monotonic() - started:.0f} s)", flush=True)
    for wheel in manifest["wheels"]:
        if wheel["stripped"]:
            print(f"install: {wheel['name']} is without some files: {wheel['stripped']['why']}", flush=True)
    if options.no_import_check:
        return 0
    return subprocess.run([str(python), str(HERE / "check_imports.py")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
