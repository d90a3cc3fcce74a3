"""wheelhouse.sh: gather from a folder of tiny wheels, install into an empty environment without a network, and every
way in which that fails.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow  # makes wheels and environments

PYTHON = f"3.{sys.version_info.minor}"
SPLIT_BYTES = 20_000


def load(root: Path, name: str) -> ModuleType:
    """A module of scripts/wheelhouse."""
    sys.path.insert(0, str(root / "scripts/wheelhouse"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


def make_wheel(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
    files: dict[str, bytes] | None = None,
) -> Path:
    """A wheel with one module, importable under its name."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    content = {f"{module}/__init__.py": f"__version__ = '{version}'\n".encode(), **(files or {})}
    content |= {
        f"{info}/METADATA": meta.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{record_digest(data)},{len(data)}\n" for path, data in content.items())
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as wheel:
        for file, data in content.items():
            wheel.writestr(file, data)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | env)


def gather(root: Path, index: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """wheelhouse.sh with the folder as the only index."""
    command = [
        "bash",
        str(root / "scripts/wheelhouse.sh"),
        "--python",
        PYTHON,
        "--glibc",
        "2.17",
        "--no-index",
        "--find-links",
        str(index),
    ]
    return run(
        [*command, "--split", str(SPLIT_BYTES), "--output", str(output), *options],
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
    )


def offline(command: list[str]) -> list[str]:
    """The command without a network, where this host lets us make such a place.

    Pip is pointed to nothing either way (see `install`).
    """
    inside = ["unshare", "--net", "--map-root-user"]
    return [*inside, *command] if run([*inside, "true"]).returncode == 0 else command


def install(house: Path, *options: str, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = offline(["bash", str(house / "install.sh"), *options])
    return run(
        command,
        PYTHON=str(python),
        PIP_INDEX_URL="http://127.0.0.1:9/",
        http_proxy="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tool-one needs leaf (50 kB, so it is cut), heavy, and something that only an old Python needs.

    Drawn has no wheel.
    """
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "tool-one", requires=("leaf>=1", "heavy", "antique; python_version < '3.0'"))
    make_wheel(folder, "leaf", version="0.9")
    make_wheel(folder, "leaf", version="1.2", files={"leaf/data.bin": hashlib.shake_256(b"seed").digest(50_000)})
    make_wheel(folder, "heavy")
    with tarfile.open(folder / "drawn-3.0.tar.gz", "w:gz") as archive:
        text = b"Metadata-Version: 2.1\nName: drawn\nVersion: 3.0\n"
        info = tarfile.TarInfo("drawn-3.0/PKG-INFO")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return folder


@pytest.fixture(scope="module")
def house(repo_root: Path, index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "house"
    result = gather(repo_root, index, output, "--only", "tool-one", "--exclude", "heavy")
    assert result.returncode == 0, result.stdout + result.stderr
    return output


@pytest.fixture
def copy(house: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(house, tmp_path / "copy"))


def test_what_is_gathered(house: Path):
    manifest = json.loads((house / "manifest.json").read_text())
    assert {w["name"]: w["version"] for w in manifest["wheels"]} == {"leaf": "1.2", "tool-one": "1.0"}
    assert manifest["left_out"] == [{"name": "heavy", "why": "excluded on the command line", "version": "1.0"}]
    files = sorted(house.glob("wheels.tar.part-*"))
    assert [p.stat().st_size for p in files][:-1] == [SPLIT_BYTES] * (len(files) - 1) and len(files) == 4
    assert [p["sha256"] for p in manifest["parts"]] == [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
    assert list(house.parent.iterdir()) == [house]


def test_the_parts_are_one_tar(house: Path):
    joined = io.BytesIO(b"".join(p.read_bytes() for p in sorted(house.glob("wheels.tar.part-*"))))
    manifest = json.loads((house / "manifest.json").read_text())
    with tarfile.open(fileobj=joined) as archive:
        digests = {m.name: hashlib.sha256(archive.extractfile(m).read()).hexdigest() for m in archive}
    assert digests == {w["file"]: w["sha256"] for w in manifest["wheels"]}


def host_with_torch(folder: Path) -> Path:
    """A virtual environment as the host's own Python, with a torch 2.11.0+cu130; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.py").write_text("__version__ = '2.11.0+cu130'\n")
    (site / "torch-2.11.0+cu130.dist-info").mkdir()
    (site / "torch-2.11.0+cu130.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+cu130\n"
    )
    return folder / "bin/python"


def test_it_installs_without_a_network(copy: Path, tmp_path: Path):
    """Into an empty environment, beside the torch of a host whose Python is a virtual environment itself."""
    manifest = json.loads((copy / "manifest.json").read_text()) | {
        "torch": "2.11.0",
        "host_provides": [{"name": "torch", "version": "2.11.0"}],
    }
    manifest["imports"].append({"wheel": "torch", "module": "torch", "gpu": False})
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = install(copy, "--venv", str(tmp_path / "place/venv"), python=host_with_torch(tmp_path / "host"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "import tool_one" in result.stdout and "all that can be imported here work" in result.stdout
    code = (
        "import leaf, torch, tool_one, importlib.util as u; print(leaf.__version__, torch.__version__,"
        " u.find_spec('heavy'))"
    )
    assert run([str(tmp_path / "place/venv/bin/python"), "-c", code]).stdout == "1.2 2.11.0+cu130 None\n"
    assert [p.name for p in (tmp_path / "place").iterdir()] == ["venv"]


def test_missing_and_corrupt_parts_are_all_named(copy: Path, tmp_path: Path):
    (copy / "wheels.tar.part-000").unlink()
    with open(copy / "wheels.tar.part-001", "r+b") as file:
        file.seek(7)
        byte = file.read(1)
        file.seek(7)
        file.write(bytes([byte[0] ^ 1]))
    os.truncate(copy / "wheels.tar.part-002", 100)
    result = install(copy, "--venv", str(tmp_path / "venv"))
    assert result.returncode == 2 and not (tmp_path / "venv").exists()
    assert "3 of 4 parts" in result.stderr and "missing: wheels.tar.part-000" in result.stderr
    assert (
        "corrupt: wheels.tar.part-001 has another sha256" in result.stderr
        and "corrupt: wheels.tar.part-002 has 100 bytes, expected 20000" in result.stderr
    )


def test_verify_only_compares_the_wheels_too(copy: Path):
    intact = install(copy, "--verify-only")
    assert intact.returncode == 0 and "4 parts and 2 wheels are intact" in intact.stdout
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["wheels"][0]["sha256"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    wrong = install(copy, "--verify-only")
    assert wrong.returncode == 2 and "corrupt: leaf-1.2-py3-none-any.whl" in wrong.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": "3.9"}, "these wheels are for Python 3.9"),
        ({"glibc": "2.999"}, "may need glibc 2.999"),
        ({"machine": "riscv64"}, "for Linux on riscv64"),
        (
            {"torch": "1.0.7", "host_provides": [{"name": "torch", "version": "1.0.7"}]},
            "go with torch 1.0.7 of the host",
        ),
    ],
)
def test_a_host_that_does_not_fit_is_refused(copy: Path, tmp_path: Path, changes: dict, message: str):
    manifest = json.loads((copy / "manifest.json").read_text()) | changes
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = install(copy, "--venv", str(tmp_path / "venv"))
    assert result.returncode == 2 and message in result.stderr and not (tmp_path / "venv").exists()


def test_a_failed_import_is_a_failure(copy: Path):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["imports"] = [
        {"wheel": "leaf", "module": "json", "gpu": False},
        {"wheel": "leaf", "module": "not_there_at_all", "gpu": False},
    ]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = run([sys.executable, str(copy / "check_imports.py")])
    assert (
        result.returncode == 1 and "FAILED: ModuleNotFoundError" in result.stdout and "1 of 2 failed" in result.stdout
    )


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("nobody-made-this", "unknown package: the index has nothing called nobody-made-this"),
        ("drawn", f"no wheel of drawn for Python {PYTHON}"),
        ("leaf>=7", "no wheel of leaf>=7"),
    ],
)
def test_what_cannot_be_had_is_named_and_nothing_is_left(
    repo_root: Path, index: Path, tmp_path: Path, only: str, message: str
):
    result = gather(repo_root, index, tmp_path / "house", "--only", only)
    assert result.returncode == 2 and message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_wrong_options_are_listed_at_once(repo_root: Path, index: Path, tmp_path: Path):
    result = gather(repo_root, index, tmp_path, "--python", "three", "--split", "12X")
    assert result.returncode == 2
    assert all(
        word in result.stderr
        for word in ("--python three", "--split 12X", "--torch and --cuda", f"--output {tmp_path} exists")
    )


def test_stripping_keeps_a_true_record(repo_root: Path, tmp_path: Path):
    wheels = load(repo_root, "wheels")
    source = make_wheel(
        tmp_path, "sglang-kernel", files={"sgl_kernel/flash_ops.abi3.so": b"x" * 9000, "sgl_kernel/run": b"kept"}
    )
    with zipfile.ZipFile(source, "a") as wheel:
        script = zipfile.ZipInfo("sgl_kernel/tool.sh")
        script.external_attr = (stat.S_IFREG | 0o755) << 16
        wheel.writestr(script, b"#!/bin/sh\n")
    target = tmp_path / "out.whl"
    rule = next(rule for rule in wheels.STRIPS if rule.package == "sglang-kernel")
    assert wheels.strip_wheel(source, target, rule.files) == [{"file": "sgl_kernel/flash_ops.abi3.so", "bytes": 9000}]
    with zipfile.ZipFile(target) as wheel:
        assert wheel.testzip() is None and wheel.getinfo("sgl_kernel/tool.sh").external_attr >> 16 & 0o777 == 0o755
        record = next(name for name in wheel.namelist() if name.endswith("RECORD"))
        rows = [line.split(",") for line in wheel.read(record).decode().splitlines()]
        expected = [[n, record_digest(wheel.read(n)), str(len(wheel.read(n)))] for n in wheel.namelist() if n != record]
    assert rows == [*expected, [record, "", ""]] and "flash_ops" not in str(rows)
    assert (
        wheels.strip_wheel(source, tmp_path / "none.whl", ("no/such/file",)) == []
        and not (tmp_path / "none.whl").exists()
    )


def package(root: Path, name: str, version: str, *requires: str):
    return load(root, "resolve").Package(
        name, version, f"{name}-{version}.whl", f"https://x/{name}", "0" * 64, requires
    )


def test_markers_are_judged_for_the_target(repo_root: Path):
    resolve = load(repo_root, "resolve")
    target = resolve.Target("3.12")
    packages = {
        "a": package(
            repo_root,
            "a",
            "1",
            "old; python_version < '3.12'",
            "new>=2; python_version >= '3.12'",
            "b[gpu]",
            "w; sys_platform == 'win32'",
        ),
        "b": package(repo_root, "b", "1", "c; extra == 'gpu'", "d; extra == 'docs'"),
    }
    closure = resolve.closure(packages, [Requirement("a")], target, frozenset())
    assert set(closure.required_by) == {"a", "b", "c", "new"} and closure.required_by["c"] == ("b",)
    assert sorted(closure.missing) == ["c", "new>=2"]
    assert resolve.closure(packages, [Requirement("a")], target, frozenset({"new", "c"})).missing == ()


def wish(root: Path, tmp_path: Path, *options: str):
    return load(root, "wish").parse(
        ["--python", "3.12", "--torch", "2.11.0", "--cuda", "13", "--output", str(tmp_path / "o"), *options]
    )


def torch_world(root: Path) -> dict:
    return {
        "app": package(root, "app", "1", "torch", "kernels-cu12", "kernels-cu13", "triton", "sympy"),
        "torch": package(
            root,
            "torch",
            "2.11.0",
            "cuda-toolkit[cublas]==13.0.2; platform_system == 'Linux'",
            "triton==3.6.0",
            "sympy>=1",
            "jinja2",
        ),
        "cuda-toolkit": package(root, "cuda-toolkit", "13.0.2", "nvidia-cublas==13.1; extra == 'cublas'"),
        **{
            name: package(root, name, version)
            for name, version in (("nvidia-cublas", "13.1"), ("triton", "3.6.0"), ("sympy", "1.1"), ("jinja2", "3"))
        },
        **{name: package(root, name, "1") for name in ("kernels-cu12", "kernels-cu13")},
    }


def test_what_comes_with_the_hosts_torch_is_left_out(repo_root: Path, tmp_path: Path):
    wheelhouse, left_out = load(repo_root, "gather"), {}
    kept, on_host = wheelhouse.select(
        torch_world(repo_root), [Requirement("app")], wish(repo_root, tmp_path, "--without-torch"), left_out
    )
    assert on_host == {"torch", "cuda-toolkit", "nvidia-cublas", "triton"}
    assert set(kept.required_by) == {"app", "kernels-cu13", "sympy"}
    assert left_out == {"kernels-cu12": "made for another CUDA than 13", "jinja2": "only needed by torch"}


def test_with_torch_everything_stays_but_the_other_cuda(repo_root: Path, tmp_path: Path):
    wheelhouse, left_out = load(repo_root, "gather"), {}
    world = torch_world(repo_root)
    kept, on_host = wheelhouse.select(world, [Requirement("app")], wish(repo_root, tmp_path), left_out)
    assert on_host == frozenset() and set(kept.required_by) == set(world) - {"kernels-cu12"}
    kept, _ = wheelhouse.select(world, [Requirement("app")], wish(repo_root, tmp_path, "--keep-all"), left_out)
    assert set(kept.required_by) == set(world)


def test_a_torch_for_another_cuda_is_refused(repo_root: Path, tmp_path: Path):
    wheelhouse = load(repo_root, "gather")
    wheelhouse.check_cuda(torch_world(repo_root), wish(repo_root, tmp_path))
    with pytest.raises(load(repo_root, "resolve").WheelhouseError, match="built for CUDA 13, not CUDA 12"):
        wheelhouse.check_cuda(torch_world(repo_root), wish(repo_root, tmp_path, "--cuda", "12"))


def test_the_sglang_that_fits_this_torch_is_chosen(repo_root: Path, index: Path, tmp_path: Path):
    resolve = load(repo_root, "resolve")
    for version, torch in (("0.5.17", "2.11.0"), ("0.5.23", "2.14.1")):
        make_wheel(tmp_path, "sglang", version=version, requires=(f"torch=={torch}",))
    options, target = ["--no-index", "--find-links", str(tmp_path)], resolve.Target(PYTHON)
    assert resolve.choose_sglang("2.11.0", None, target, options) == ("0.5.17", ["0.5.23 needs torch==2.14.1"])
    with pytest.raises(resolve.WheelhouseError, match=r"0\.5\.23 needs torch==2\.14\.1.*you asked for torch 2\.11\.0"):
        resolve.choose_sglang("2.11.0", "0.5.23", target, options)
    assert {Requirement(str(r)).name for r in load(repo_root, "gather").gpu_extra()} >= {"sglang", "transformer-engine"}
