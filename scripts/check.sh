#!/usr/bin/env bash
# ruff (rules and format), types, architecture, unit tests: the same command locally and in CI.
#   bash scripts/check.sh            everything
#   bash scripts/check.sh --fast     without the unit tests that are marked slow: under a minute on two cores
#   bash scripts/check.sh --static   without the unit tests, but for the architecture's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

# Two processes a core, for tests that wait; eight at most: each imports torch, which takes seconds and a gigabyte.
workers=$((2 * $(nproc)))
workers=(-n "$((workers < 8 ? workers : 8))" --dist worksteal)
case "${1:-}" in
  "") tests=("${workers[@]}" tests/unit) ;;
  --fast) tests=("${workers[@]}" -m "not slow" tests/unit) ;;
  --static) tests=(tests/unit/test_architecture.py) ;;
  *) printf 'check: unknown option %s. Known: --fast, --static.\n' "$1" >&2; exit 2 ;;
esac

bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"

ruff check --quiet .
ruff format --check --quiet . || { printf 'check: badly formatted, see: ruff format --check . Fix: ruff format .\n' >&2; exit 1; }
printf 'check: ruff ok\n'
mypy --no-error-summary
printf 'check: types ok after %d s\n' "${SECONDS}"
python -m pytest -q "${tests[@]}"
printf 'check: all ok in %d s\n' "${SECONDS}"
