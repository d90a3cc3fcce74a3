"""setup.sh on stand-ins for Python and nvidia-smi: what it chooses and runs, when it does nothing, how it mends, what
it says. The choice itself: test_choose_set.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: Plays the host's Pythons and the one in .venv: notes its arguments; `-m venv` copies it; fails what FAIL names. Its
#: version is in its name, or in a file that `-m venv` has left. TORCH is what all Pythons of the host have.
STAND_IN = """#!/bin/bash
printf '%s\\n' "$*" >>"${CALLS}"
if [[ -n "${FAIL:-}" && "$*" == *"${FAIL}"* ]]; then echo "ERROR: the registry is on fire"; exit 1; fi
version=${0##*/python}
if [[ -f "${0%/bin/*}/version" ]]; then read -r version <"${0%/bin/*}/version"; fi
case "$*" in
  *platform.machine*) echo "${DIGESTS_OF:-}" ;;
  *version_info*) echo "${version:-3.11}" ;;
  *'find_spec("torch")'*) if [[ -n "${TORCH:-}" ]]; then echo "${TORCH}"; fi ;;
  scripts/lib/choose_set.py*) exec "${REAL_PYTHON}" "$@" ;;
  "-m pip check") printf '%s\\n' "${PIP_CHECK:-}" ;;
  "-m venv "*)
    for folder; do :; done
    mkdir -p "${folder}/bin"; cp "$0" "${folder}/bin/python"; echo "${version:-3.11}" >"${folder}/version" ;;
esac
exit 0
"""
NVIDIA_SMI = """#!/bin/bash
if [[ "${1:-}" == -L ]]; then
  echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"; echo "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"
else
  echo "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: ${DRIVER_CUDA:-13.0}     |"
fi
"""
#: What setup.sh calls beside Python and nvidia-smi. A fake host has nothing else.
TOOLS = "bash cat cp cut dirname flock grep mkdir rm sed sha256sum tail".split()


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Tree:
    """A copy of what setup.sh needs, on a host with `programs` only."""

    def __init__(self, folder: Path, root: Path, programs: dict[str, str]):
        self.folder, self.calls_file = folder, folder / "calls"
        folder.mkdir(exist_ok=True)
        shutil.copytree(root / "scripts" / "requirements", folder / "scripts" / "requirements")
        (folder / "scripts" / "lib").mkdir()
        for name in ("scripts/setup.sh", "scripts/lib/choose_set.py", "setup.py"):
            shutil.copyfile(root / name, folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for name, text in programs.items():
            write_program(self.bin / name, text)

    def setup(self, *options: str, **env: str) -> subprocess.CompletedProcess:
        """Run setup.sh, having forgotten earlier calls."""
        self.calls_file.unlink(missing_ok=True)
        environment = {"PATH": str(self.bin), "CALLS": str(self.calls_file), "REAL_PYTHON": sys.executable} | env
        command = ["bash", str(self.folder / "scripts/setup.sh"), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    def installs(self) -> list[str]:
        """The pip installations of the last run."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line.split(" install ")[1] for line in lines if " install " in line]

    def made_with(self) -> list[str]:
        """How environments were made in the last run."""
        return [line for line in self.calls_file.read_text().splitlines() if line.startswith("-m venv")]


@pytest.fixture
def tree(tmp_path: Path, repo_root: Path) -> Tree:
    return Tree(tmp_path, repo_root, {"python3.11": STAND_IN})


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(
    ("torch", "gpu_set", "version", "sglang"),
    [
        ("", "gpu-newest", "2.14.1", "0.5.23"),
        ("2.11.0+cu130 13.0", "gpu-torch211", "2.11.0", "0.5.17"),
        ("2.9.1+cu128 12.8", "gpu-newest", "2.14.1", "0.5.23"),
    ],
)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_every_host_gets_its_set(tmp_path, repo_root, python, torch, gpu_set, version, sglang, has_gpu):
    programs = {f"python{python}": STAND_IN} | ({"nvidia-smi": NVIDIA_SMI} if has_gpu else {})
    tree = Tree(tmp_path, repo_root, programs)
    done = tree.setup(TORCH=torch)
    assert done.returncode == 0, done.stderr
    name = gpu_set if has_gpu else "cpu"
    assert done.stdout.startswith(f"setup: set {name} (torch ")
    assert f"with Python {python}: {'2 x NVIDIA H100' if has_gpu else 'nvidia-smi lists no GPU'}" in done.stdout
    installs = tree.installs()
    if has_gpu:
        pins = f"-c scripts/requirements/constraints-{name}.txt"
        wanted = [
            "setuptools wheel ninja",
            f"torch=={version}",
            f"sglang=={sglang}",
            "--no-build-isolation -e .[dev,tinker]",
        ]
        assert [line.partition(f"{pins} ")[2] for line in installs] == wanted
    else:
        assert [line.split()[-1] for line in installs][0] == "torch==2.13.0+cpu"
    sees_host = has_gpu and gpu_set == "gpu-torch211"
    assert tree.made_with() == [f"-m venv {'--system-site-packages ' if sees_host else ''}.venv"]
    # Nothing is to do, and nothing is said, when it is called again as every script does.
    again = tree.setup(TORCH=torch)
    assert (again.returncode, again.stdout, tree.installs()) == (0, "", [])


def test_transformer_engine_is_compiled_where_nvcc_is(tmp_path, repo_root):
    host = {"python3.12": STAND_IN, "nvidia-smi": NVIDIA_SMI}
    without = Tree(tmp_path / "without", repo_root, host)
    done = without.setup("--set", "gpu-torch211")
    assert "no nvcc on the PATH" in done.stdout and not any("transformer-engine" in line for line in without.installs())
    tree = Tree(tmp_path / "with", repo_root, host | {"nvcc": "#!/bin/bash\n"})
    assert tree.setup("--set", "gpu-torch211").returncode == 0
    assert tree.installs()[-1].endswith("--no-build-isolation transformer-engine[pytorch,core_cu13]==2.11.0")


def test_an_environment_keeps_its_set_and_its_python(tmp_path, repo_root):
    tree = Tree(tmp_path, repo_root, {"python3.11": STAND_IN, "python3.12": STAND_IN, "nvidia-smi": NVIDIA_SMI})
    assert "set cpu (" in tree.setup("--cpu", PYTHON=str(tree.bin / "python3.12")).stdout
    (tree.folder / ".venv/pyvenv.cfg").write_text(f"executable = {tree.bin}/python3.12\n")
    with open(tree.folder / "setup.py", "a") as file:
        file.write("\n# changed\n")
    again = tree.setup()
    assert "set cpu (" in again.stdout and "with Python 3.12: what .venv holds" in again.stdout
    assert tree.made_with() == []
    assert len(tree.installs()) == 5
    other = tree.setup("--gpu")
    assert ".venv held the set cpu; starting it anew" in other.stdout and "set gpu-newest (" in other.stdout
    assert tree.made_with() == ["-m venv .venv"]


def test_a_host_where_no_set_fits_is_told_the_fix(tmp_path, repo_root):
    tree = Tree(tmp_path, repo_root, {"python3.12": STAND_IN, "nvidia-smi": NVIDIA_SMI})
    done = tree.setup(DRIVER_CUDA="12.8")
    assert done.returncode == 1 and "speaks CUDA 12.8" in done.stderr and "Fix: a driver of version 580" in done.stderr
    assert "Known: cpu, gpu-torch211, gpu-newest" in tree.setup("--set", "gpu").stderr
    assert tree.setup("--set").returncode == 1
    assert not (tree.folder / ".venv").exists() and tree.installs() == []


def test_the_choice_alone_installs_nothing(tree: Tree):
    done = tree.setup("--choice")
    assert done.stdout == "setup: set cpu (torch 2.13.0+cpu, sglang 0.5.23) with Python 3.11: nvidia-smi lists no GPU\n"
    assert tree.installs() == [] and not (tree.folder / ".venv").exists()


def test_stages_run_in_order(tree: Tree):
    assert tree.setup().returncode == 0
    torch, packages, sglang, environments, project = tree.installs()
    assert "torch==2.13.0+cpu" in torch
    assert "-c scripts/requirements/constraints-cpu.txt -r scripts/requirements/cpu.txt" in packages
    assert "--no-deps -r scripts/requirements/cpu-nodeps.txt" in sglang
    assert "--no-deps --no-build-isolation -r scripts/requirements/envs.txt" in environments
    assert "--no-deps --no-build-isolation -e ." in project


def test_where_there_are_digests_packages_are_taken_by_them(tree: Tree):
    assert tree.setup(DIGESTS_OF="hashes-cpu-cp311-x86_64").returncode == 0
    packages, torch, *_ = tree.installs()
    assert packages.endswith("--no-deps --require-hashes -r scripts/requirements/hashes-cpu-cp311-x86_64.txt")
    assert torch.endswith("--no-deps torch==2.13.0+cpu")  # what it would bring is here, and compared
    (tree.folder / ".venv/setup.stamp").unlink()
    done = tree.setup("--no-digests", DIGESTS_OF="hashes-cpu-cp311-x86_64")
    assert "by version, not by digest (--no-digests)" in done.stdout
    assert "-r scripts/requirements/cpu.txt" in tree.installs()[1]


def test_without_a_compiler_the_libraries_of_environments_are_left_out(tree: Tree):
    done = tree.setup(FAIL="Python.h")
    assert done.returncode == 0 and "no C compiler, or no Python.h" in done.stdout
    assert len(tree.installs()) == 4 and not any("envs.txt" in line for line in tree.installs())


def test_a_second_run_does_nothing(tree: Tree):
    tree.setup()
    again = tree.setup()
    assert (again.returncode, again.stdout, tree.installs()) == (0, "", [])


@pytest.mark.parametrize("name", ["scripts/requirements/cpu.txt", "setup.py", "scripts/setup.sh"])
def test_a_changed_input_runs_it_again(tree: Tree, name: str):
    tree.setup()
    with open(tree.folder / name, "a") as file:
        file.write("\n# changed\n")
    assert tree.setup().returncode == 0 and len(tree.installs()) == 5


def test_an_interrupted_run_starts_anew(tree: Tree):
    tree.setup()
    (tree.folder / ".venv/unfinished").write_text("packages\n")
    (tree.folder / ".venv/half-written").touch()
    result = tree.setup()
    assert result.returncode == 0 and 'interrupted during "packages"' in result.stdout
    assert len(tree.installs()) == 5 and not (tree.folder / ".venv/half-written").exists()


def test_a_failed_stage_shows_its_log_and_the_next_run_goes_on(tree: Tree):
    failed = tree.setup(FAIL="cpu-nodeps.txt")
    assert failed.returncode == 1
    assert "sglang (no dependencies) failed" in failed.stderr and "the registry is on fire" in failed.stderr
    mended = tree.setup()
    assert mended.returncode == 0 and "interrupted" not in mended.stdout


def test_torch_comes_from_the_cpu_index_where_the_usual_one_lacks_it(tree: Tree):
    # The second try differs only in the index, so failing what begins the first one's arguments is enough.
    assert tree.setup(FAIL="--progress-bar off torch==").returncode == 0
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in tree.installs()[1]


def test_an_expected_line_of_pip_check_passes_and_another_fails(tree: Tree, repo_root: Path):
    expected = (repo_root / "scripts/requirements/pip-check-expected.txt").read_text().splitlines()[0]
    assert tree.setup(PIP_CHECK=expected).returncode == 0
    (tree.folder / ".venv/setup.stamp").unlink()
    failed = tree.setup(PIP_CHECK="ray 2.60.0 requires click, which is not installed.")
    assert failed.returncode == 1 and "ray 2.60.0 requires click" in failed.stderr


def test_without_the_right_python_it_says_what_to_install(tree: Tree):
    result = tree.setup(PYTHON=str(tree.folder / "no-python"))
    assert result.returncode == 1 and "apt-get install python3.11 python3.11-venv" in result.stderr
    assert "python3.12" in result.stderr
    assert not (tree.folder / ".venv").exists()


def test_without_the_venv_module_it_names_the_debian_package(tree: Tree):
    result = tree.setup(FAIL="import ensurepip")
    assert result.returncode == 1 and "apt-get install python3.11-venv" in result.stderr


def test_unknown_options_are_refused(tree: Tree):
    result = tree.setup("--tpu")
    assert result.returncode == 1 and "--tpu" in result.stderr
