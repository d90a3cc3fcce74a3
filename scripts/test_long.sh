#!/usr/bin/env bash
# Runs what scripts/test.sh leaves out because it takes long: the whole parity table, the whole table of weight sync faults, more whole runs
# (about 25 minutes on two cores), and the soak of asynchronous generation (7 more; SOAK_SECONDS).
#   bash scripts/test_long.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec bash scripts/test.sh tests/multiprocess tests/contract tests/e2e tests/pretend_gpu tests/fuzz tests/unit -m "parity_table or fault_table or long_run" "$@"
