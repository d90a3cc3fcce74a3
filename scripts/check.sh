#!/usr/bin/env bash
# ruff, types, architecture, unit tests: the same command locally and in CI.
#   bash scripts/check.sh            everything
#   bash scripts/check.sh --static   without the unit tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1

case "${1:-}" in
  "" | --static) ;;
  *) printf 'check: unknown option %s. Known: --static.\n' "$1" >&2; exit 2 ;;
esac

bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"

ruff check --quiet .
printf 'check: ruff ok\n'
mypy --no-error-summary
printf 'check: types ok\n'
if [[ "${1:-}" == --static ]]; then
  python -m pytest -q tests/unit/test_architecture.py
else
  python -m pytest -q tests/unit
fi
printf 'check: all ok in %d s\n' "${SECONDS}"
