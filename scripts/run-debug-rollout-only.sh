#!/usr/bin/env bash
# Rollout only: engines generate and rewards score, no trainer is started. Each rollout's samples are kept for
# run-debug-train-only.sh. Takes the variables and flags of run-disaggregated.sh.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SAMPLES="${SAMPLES:-${ROOT}/runs/debug-samples}"   # folder of the kept samples
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-rollout-only}"
exec bash "${ROOT}/scripts/run-disaggregated.sh" --debug-rollout-only --save-debug-rollout-data "${SAMPLES}/{rollout_id}.npz" "$@"
