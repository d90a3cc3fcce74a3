#!/usr/bin/env bash
# Train only: the samples that run-debug-rollout-only.sh kept are trained on, no engine is started.
# Takes the variables and flags of run-disaggregated.sh.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SAMPLES="${SAMPLES:-${ROOT}/runs/debug-samples}"   # folder of the kept samples
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-train-only}"
exec bash "${ROOT}/scripts/run-disaggregated.sh" --debug-train-only --load-debug-rollout-data "${SAMPLES}/{rollout_id}.npz" "$@"
