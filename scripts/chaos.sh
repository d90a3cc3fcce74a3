#!/usr/bin/env bash
# Puts faults into whole runs, each part of a run in each phase, and writes what came of them to benchmarks/results/chaos.md.
#   bash scripts/chaos.sh                           all cells (hours on two cores)
#   bash scripts/chaos.sh --missing --minutes 30    those without an outcome yet, as many as fit
#   bash scripts/chaos.sh --only kill engine        cells with these words
#   bash scripts/chaos.sh --fast                    a few faults in one run
#   bash scripts/chaos.sh --table                   the table alone, of what is kept
#   bash scripts/chaos.sh --soak 1200               a random fault every 20 s for so many seconds, beside a run without faults (root)
# CHAOS_PATIENCE=3: deadlines of three times as long, on a host that does much else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
exec python -m tests.e2e.chaos "$@"
