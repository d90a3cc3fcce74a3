#!/usr/bin/env bash
# Makes .venv with everything that running and testing needs. Run again at will: seconds when nothing is to do.
#   bash scripts/setup.sh [--set NAME | --cpu | --gpu] [--choice] [--no-digests]
# Which packages: one of the sets in scripts/requirements/sets.toml, chosen by what the host has (scripts/lib/choose_set.py) and printed with its
# reason; a .venv keeps its set. --set NAME takes that one, --cpu and --gpu one of that kind; --choice only prints the choice.
# On a CPU host packages are taken by their digests, where there are some for its Python and processor; --no-digests: by version, for an index with other builds.
# PYTHON=/path/to/python3.12 chooses the interpreter (3.11 or 3.12). docs/install.md tells more.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=.venv
STAMP="${VENV}/setup.stamp"      # hash of the inputs of the set-up that this .venv holds
SET_FILE="${VENV}/setup.set"     # the name of its set
UNFINISHED="${VENV}/unfinished"  # there while a stage runs; found at start, it tells of an interruption
LOG="${VENV}/setup.log"
REQUIREMENTS=scripts/requirements
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
PYTHONS=(3.11 3.12)

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

WISH=() ONLY_CHOICE=no DIGESTS=yes
while (($#)); do
  case "$1" in
    --cpu) WISH=(--kind cpu) ;;
    --gpu) WISH=(--kind gpu) ;;
    --set) [[ -n "${2:-}" ]] || die "--set needs the name of a set, see ${REQUIREMENTS}/sets.toml"; WISH=(--set "$2"); shift ;;
    --choice) ONLY_CHOICE=yes ;;
    --no-digests) DIGESTS=no ;;
    *) die "unknown option $1. Known: --set NAME, --cpu, --gpu, --choice, --no-digests." ;;
  esac
  shift
done

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# "VERSION CUDA" of the torch that an interpreter has, without importing it; nothing where there is none.
torch_of() {
  "$1" -c 'import importlib.util, os, runpy
spec = importlib.util.find_spec("torch")
if spec: about = runpy.run_path(os.path.join(spec.submodule_search_locations[0], "version.py")); print(about["__version__"], about.get("cuda") or "")' 2>/dev/null || true
}

list_gpus() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | sed -n 's/^GPU [0-9]*: \(.*\) (UUID.*/\1/p' || true; }
driver_cuda() { nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' || true; }

# An interpreter that the sets are for: PYTHON, the one that a kept .venv was made with, or the first on the PATH; on a GPU host rather one that has
# torch already.
find_python() {
  local candidate path first="" candidates=(python3.11 python3.12 python3 python)
  if [[ "${KEEPS}" == yes ]]; then
    candidate=$(sed -n 's/^executable = //p' "${VENV}/pyvenv.cfg" 2>/dev/null || true)
    if [[ -x "${candidate}" ]]; then printf '%s\n' "${candidate}"; return; fi
  fi
  if [[ -n "${PYTHON:-}" ]]; then candidates=("${PYTHON}"); fi
  for candidate in "${candidates[@]}"; do
    if [[ " ${PYTHONS[*]} " == *" $(version_of "${candidate}" || true) "* ]] && path=$(command -v "${candidate}"); then
      if [[ -z "${GPUS}" || -n "$(torch_of "${path}")" ]]; then printf '%s\n' "${path}"; return; fi
      first="${first:-${path}}"
    fi
  done
  [[ -n "${first}" ]] || die "needs Python 3.11 or 3.12 (megatron-core 0.16 and sglang have wheels for them, and nothing else was tried), found none among: ${candidates[*]}.
  Debian 12:     apt-get install python3.11 python3.11-venv
  Ubuntu 24.04:  apt-get install python3.12 python3.12-venv
  elsewhere:     PYTHON=/path/to/python3.12 bash scripts/setup.sh"
  printf '%s\n' "${first}"
}

# Sets SET, TORCH, SGLANG, TRANSFORMER_ENGINE, CONSTRAINTS, HOST_TORCH and REASON.
choose() {
  local python=$1 torch cuda key value answer
  read -r torch cuda < <(torch_of "${python}") || true
  answer=$("${python}" scripts/lib/choose_set.py --python "$(version_of "${python}")" --gpus "${GPUS}" --driver-cuda "$(driver_cuda)" \
    --torch "${torch:-}" --torch-cuda "${cuda:-}" "${WISH[@]}" 2>&1) || die "${answer}"
  while IFS='=' read -r key value; do printf -v "${key^^}" '%s' "${value}"; done <<<"${answer}"
}

inputs_hash() {
  { printf '%s\n' "${SET}"; pwd; cat scripts/setup.sh setup.py scripts/lib/choose_set.py "${REQUIREMENTS}"/*.t*; } | sha256sum | cut -d' ' -f1
}

# stage NAME COMMAND...: run it with its output in the log; on failure show the end of the log.
stage() {
  local name=$1 started=${SECONDS}
  shift
  printf '%s\n' "${name}" >"${UNFINISHED}"
  printf '\n== %s: %s\n' "${name}" "$*" >>"${LOG}"
  if ! "$@" >>"${LOG}" 2>&1; then
    # pip undoes what it could not finish, so after an error (unlike after a kill) the next run may go on from here.
    rm -f "${UNFINISHED}"
    printf 'setup: %s failed. The end of %s:\n' "${name}" "${LOG}" >&2
    tail -n 25 "${LOG}" >&2
    exit 1
  fi
  rm -f "${UNFINISHED}"
  printf 'setup: %-28s %4d s\n' "${name}" "$((SECONDS - started))"
}

pip_install() { "${VENV}/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

install_torch_cpu() {
  # Where the configured index has the CPU build, take it; PyPI has only the CUDA build under this version.
  pip_install "$@" "torch==${TORCH}" || pip_install "$@" --index-url "${TORCH_CPU_INDEX}" "torch==${TORCH}"
}

check_packages() {
  local unexpected
  unexpected=$("${VENV}/bin/python" -m pip check 2>/dev/null | grep -vxF -e 'No broken requirements found.' -f "${REQUIREMENTS}/pip-check-expected.txt" || true)
  [[ -z "${unexpected}" ]] || { printf 'packages that do not fit together:\n%s\n' "${unexpected}"; return 1; }
}

# A .venv of another set or Python is made anew; one that is whole is kept.
make_venv() {
  local python=$1 options=()
  if [[ -e "${UNFINISHED}" ]]; then
    printf 'setup: the last run was interrupted during "%s"; starting %s anew\n' "$(cat "${UNFINISHED}")" "${VENV}"
    rm -rf "${VENV}"
  elif [[ -e "${SET_FILE}" && "$(cat "${SET_FILE}")" != "${SET}" ]]; then
    printf 'setup: %s held the set %s; starting it anew\n' "${VENV}" "$(cat "${SET_FILE}")"
    rm -rf "${VENV}"
  elif [[ -e "${VENV}" && "$(version_of "${VENV}/bin/python" || true)" != "$(version_of "${python}")" ]]; then
    rm -rf "${VENV}"
  fi
  if ! "${VENV}/bin/python" -c 'import pip' 2>/dev/null; then
    "${python}" -c 'import ensurepip, venv' 2>/dev/null || die "${python} cannot make virtual environments. Debian and Ubuntu: apt-get install python$(version_of "${python}")-venv"
    if [[ "${HOST_TORCH}" == yes ]]; then options=(--system-site-packages); fi
    mkdir -p "${VENV}"
    stage "virtual environment" "${python}" -m venv "${options[@]}" "${VENV}"
  fi
}

# reasoning-gym needs pycosat, of which there is no wheel.
can_compile() {
  "${VENV}/bin/python" -c 'import os, shutil, sys, sysconfig
has_headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (has_headers and shutil.which(sysconfig.get_config_var("CC").split()[0])))'
}

install_environments() {
  if can_compile; then
    stage "libraries of environments" pip_install --no-deps --no-build-isolation -r "${REQUIREMENTS}/envs.txt"
  else
    printf 'setup: no C compiler, or no Python.h: without the libraries of environments (docs/agents.md); the tests of their adapters are skipped\n'
  fi
}

install_cpu() {
  local constraints="${REQUIREMENTS}/${CONSTRAINTS}" digests
  digests=$("${VENV}/bin/python" -c 'import platform, sys; print("hashes-cpu-cp%d%d-" % sys.version_info[:2] + platform.machine())').txt
  if [[ "${DIGESTS}" == yes && -f "${REQUIREMENTS}/${digests}" ]]; then
    # All of them first: what torch brought along would not be compared any more.
    stage "packages (by digest)" pip_install --no-deps --require-hashes -r "${REQUIREMENTS}/${digests}"
    stage "torch (CPU)" install_torch_cpu --no-deps
  else
    printf 'setup: packages are taken by version, not by digest (%s)\n' "$([[ "${DIGESTS}" == no ]] && echo --no-digests || echo "no ${REQUIREMENTS}/${digests}")"
    stage "torch (CPU)" install_torch_cpu
    stage "packages" pip_install -c "${constraints}" -r "${REQUIREMENTS}/cpu.txt"
    stage "sglang (no dependencies)" pip_install --no-deps -r "${REQUIREMENTS}/cpu-nodeps.txt"
  fi
  install_environments
  stage "slime_like (editable)" pip_install --no-deps --no-build-isolation -e .
  stage "package check" check_packages
}

# pip leaves a torch of the host alone that the pin admits.
install_gpu() {
  local pins=(-c "${REQUIREMENTS}/${CONSTRAINTS}")
  stage "build tools" pip_install "${pins[@]}" setuptools wheel ninja
  stage "torch (CUDA)" pip_install "${pins[@]}" "torch==${TORCH}"
  stage "sglang" pip_install "${pins[@]}" "sglang==${SGLANG}"
  stage "slime_like (editable)" pip_install "${pins[@]}" --no-build-isolation -e ".[dev,tinker]"
  if [[ -z "${TRANSFORMER_ENGINE}" ]]; then
    printf 'setup: no transformer-engine: the trainer uses layers of torch'"'"'s own (docs/install.md)\n'
  elif ! command -v nvcc >/dev/null; then
    printf 'setup: no nvcc on the PATH, so no transformer-engine, which is compiled here: the trainer uses layers of torch'"'"'s own. Fix: the CUDA toolkit, and setup again (docs/install.md)\n'
  else
    stage "transformer-engine (compiled)" pip_install "${pins[@]}" --no-build-isolation "transformer-engine[pytorch,core_cu13]==${TRANSFORMER_ENGINE}"
  fi
}

# One set-up at a time: a lock on this file itself leaves nothing behind.
exec 9<scripts/setup.sh
flock -w 1800 9 || die "another set-up of this folder has been running for 30 minutes"

is_ready() { [[ -f "${STAMP}" && "$(cat "${STAMP}")" == "$(inputs_hash)" && ! -e "${UNFINISHED}" ]] && "${VENV}/bin/python" -c '' 2>/dev/null; }

# Without a wish a .venv keeps its set and its Python.
KEEPS=no FROM_VENV=no
if ((${#WISH[@]} == 0)) && [[ -f "${SET_FILE}" ]]; then
  SET=$(cat "${SET_FILE}") FROM_VENV=yes
  WISH=(--set "${SET}")
  if [[ -z "${PYTHON:-}" || "$(version_of "${PYTHON}" || true)" == "$(version_of "${VENV}/bin/python" || true)" ]]; then
    KEEPS=yes
    if [[ "${ONLY_CHOICE}" == no ]] && is_ready; then exit 0; fi
  fi
fi
GPUS=$(list_gpus)
python=$(find_python)
choose "${python}"
if [[ "${FROM_VENV}" == yes ]]; then REASON="what ${VENV} holds; --set, --cpu or --gpu for another"; fi
printf 'setup: set %s (torch %s, sglang %s) with Python %s: %s\n' "${SET}" "${TORCH}" "${SGLANG}" "$(version_of "${python}")" "${REASON}"
if [[ "${ONLY_CHOICE}" == yes ]]; then exit 0; fi
make_venv "${python}"
if is_ready; then exit 0; fi
rm -f "${STAMP}"
printf '%s\n' "${SET}" >"${SET_FILE}"
if [[ "${SET}" == cpu ]]; then install_cpu; else install_gpu; fi
inputs_hash >"${STAMP}"
printf 'setup: done in %d s (%s)\n' "${SECONDS}" "${SET}"
