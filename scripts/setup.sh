#!/usr/bin/env bash
# Makes .venv with everything that running and testing needs. Run again at will: seconds when nothing is to do.
#   bash scripts/setup.sh [--cpu | --gpu]
# Default: --gpu where nvidia-smi lists a GPU, else --cpu. PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=.venv
STAMP="${VENV}/setup.stamp"      # hash of the inputs of the set-up that this .venv holds
UNFINISHED="${VENV}/unfinished"  # there while a stage runs; found at start, it tells of an interruption
LOG="${VENV}/setup.log"
REQUIREMENTS=scripts/requirements
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

MODE=cpu
if command -v nvidia-smi >/dev/null && [[ -n "$(nvidia-smi -L 2>/dev/null || true)" ]]; then MODE=gpu; fi
for option in "$@"; do
  case "${option}" in
    --cpu) MODE=cpu ;;
    --gpu) MODE=gpu ;;
    *) die "unknown option ${option}. Known: --cpu, --gpu." ;;
  esac
done

find_python() {
  local candidate
  local candidates=(python3.11 python3 python)
  if [[ -n "${PYTHON:-}" ]]; then candidates=("${PYTHON}"); fi
  for candidate in "${candidates[@]}"; do
    if "${candidate}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "${candidate}"
      return
    fi
  done
  die "needs Python 3.11 (the last one that megatron-core 0.16 has wheels for), found none among: ${candidates[*]}.
  Debian 12:  apt-get install python3.11 python3.11-venv
  elsewhere:  PYTHON=/path/to/python3.11 bash scripts/setup.sh"
}

inputs_hash() {
  { printf '%s\n' "${MODE}"; pwd; cat scripts/setup.sh setup.py "${REQUIREMENTS}"/*.txt; } | sha256sum | cut -d' ' -f1
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
  local pin
  pin=$(grep '^torch==' "${REQUIREMENTS}/constraints-cpu.txt")
  # Where the configured index has the CPU build, take it; PyPI has only the CUDA build under this version.
  pip_install "${pin}" || pip_install --index-url "${TORCH_CPU_INDEX}" "${pin}"
}

check_packages() {
  local unexpected
  unexpected=$("${VENV}/bin/python" -m pip check 2>/dev/null | grep -vxF -e 'No broken requirements found.' -f "${REQUIREMENTS}/pip-check-expected.txt" || true)
  [[ -z "${unexpected}" ]] || { printf 'packages that do not fit together:\n%s\n' "${unexpected}"; return 1; }
}

make_venv() {
  if [[ -e "${UNFINISHED}" ]]; then
    printf 'setup: the last run was interrupted during "%s"; starting %s anew\n' "$(cat "${UNFINISHED}")" "${VENV}"
    rm -rf "${VENV}"
  fi
  if ! "${VENV}/bin/python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    local python
    python=$(find_python)
    "${python}" -c 'import ensurepip, venv' 2>/dev/null || die "${python} cannot make virtual environments. Debian 12: apt-get install python3.11-venv"
    mkdir -p "${VENV}"
    stage "virtual environment" "${python}" -m venv "${VENV}"
  fi
}

install_cpu() {
  local constraints="${REQUIREMENTS}/constraints-cpu.txt"
  stage "torch (CPU)" install_torch_cpu
  stage "packages" pip_install -c "${constraints}" -r "${REQUIREMENTS}/cpu.txt"
  stage "sglang (no dependencies)" pip_install --no-deps -r "${REQUIREMENTS}/cpu-nodeps.txt"
  stage "slime_like (editable)" pip_install --no-deps --no-build-isolation -e .
  stage "package check" check_packages
}

# Not run on a GPU host yet: stock sglang brings its torch; transformer-engine compiles against it.
install_gpu() {
  stage "build tools" pip_install setuptools wheel ninja
  stage "sglang and torch (CUDA)" pip_install "sglang>=0.5.23,<0.6"
  stage "slime_like and extras" pip_install --no-build-isolation -e ".[gpu,dev]"
}

# One set-up at a time: a lock on this file itself leaves nothing behind.
exec 9<scripts/setup.sh
flock -w 1800 9 || die "another set-up of this folder has been running for 30 minutes"

HASH=$(inputs_hash)
if [[ -f "${STAMP}" && "$(cat "${STAMP}")" == "${HASH}" && ! -e "${UNFINISHED}" ]] && "${VENV}/bin/python" -c '' 2>/dev/null; then
  exit 0
fi
make_venv
rm -f "${STAMP}"
"install_${MODE}"
printf '%s\n' "${HASH}" >"${STAMP}"
printf 'setup: done in %d s (%s)\n' "${SECONDS}" "${MODE}"
