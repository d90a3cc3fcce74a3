#!/usr/bin/env bash
# The first hour on a GPU as one command: a ladder from the driver up to mixtures of experts over two GPUs.
#   bash scripts/gpu_check.sh [--gpus N] [--only RUNG,…] [--output DIR] [--device cuda|pretend] [--hf-checkpoint DIR]
# Each rung has a deadline and a verdict; DIR gets gpu_report.md and gpu_report.json, the page to send back, and every log.
# Without a GPU the rungs run on the CPU or on a pretended device, and the page says which. Status 1 if a rung failed.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-${HERE}/../.venv/bin/python}"
[[ -x "${PYTHON}" ]] || { printf 'gpu_check: no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }
exec "${PYTHON}" "${HERE}/gpu_check/check.py" "$@"
