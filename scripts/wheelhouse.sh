#!/usr/bin/env bash
# Gathers a complete offline install for a GPU host without a network, as parts of at most one size, with an installer that checks digests.
#   bash scripts/wheelhouse.sh --python 3.12 --torch 2.11.0 --cuda 13 --split 60M [--output DIR] [--without-torch] [--exclude NAME] [--only NAME]
# Then carry the folder over and run its install.sh. docs/air-gapped.md tells more; --help lists every option.
# PYTHON chooses the interpreter whose pip does the work (any version; default: this checkout's .venv).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-${HERE}/../.venv/bin/python}"
[[ -x "${PYTHON}" ]] || { printf 'wheelhouse: no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }
exec "${PYTHON}" "${HERE}/wheelhouse/gather.py" "$@"
