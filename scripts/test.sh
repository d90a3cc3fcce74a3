#!/usr/bin/env bash
# Makes .venv (once) and runs the tests.
#   bash scripts/test.sh                    all of them, in three lanes at once: they wait much
#   bash scripts/test.sh tests/unit -k plan anything pytest takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"

# Many small processes share few cores: one thread each is faster than all of them fighting.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# Nothing may be fetched from a model hub, nor reported to anyone.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

# In a subshell, whose process becomes pytest, so that it can be ended.
run_tests() { exec python -m pytest --durations=15 --durations-min=1 --require-passed "$@"; }

status=0
if (($#)); then
  (run_tests "$@") || status=$?
else
  # Every test is in one of the lanes: the last has whatever the others leave out. Whole runs are one after another: two
  # of them at a time make two cores the bound, and nothing ends sooner.
  first=(tests/e2e)
  second=(tests/multiprocess tests/contract tests/pretend_gpu)
  outputs=$(mktemp -d)
  (run_tests "${second[@]}" >"${outputs}/second" 2>&1) &
  pids=($!)
  (run_tests tests "${first[@]/#/--ignore=}" "${second[@]/#/--ignore=}" >"${outputs}/rest" 2>&1) &
  pids+=($!)
  trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "${outputs}"' EXIT
  printf '== %s\n' "${first[*]}"
  (run_tests "${first[@]}") || status=$?
  for pid in "${pids[@]}"; do
    wait "${pid}" || status=$((status ? status : $?))
  done
  printf '\n== %s, which ran at the same time\n' "${second[*]}"
  cat "${outputs}/second"
  printf '\n== the other tests, which ran at the same time\n'
  cat "${outputs}/rest"
fi
printf 'tests: %d s in all, exit status %d\n' "${SECONDS}" "${status}"
exit "${status}"
