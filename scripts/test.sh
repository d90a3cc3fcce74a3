#!/usr/bin/env bash
# Makes .venv (once) and runs the tests.
#   bash scripts/test.sh                    all of them
#   bash scripts/test.sh tests/unit -k plan anything pytest takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"

# Many small processes share few cores: one thread each is faster than all of them fighting.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# Nothing may be fetched from a model hub, nor reported to anyone.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

status=0
python -m pytest --durations=15 --durations-min=1 --require-passed "$@" || status=$?
printf 'tests: %d s in all, exit status %d\n' "${SECONDS}" "${status}"
exit "${status}"
