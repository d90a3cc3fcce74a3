#!/usr/bin/env bash
# Generating while training: run-disaggregated.sh with --async-mode. The same variables; flags are passed on.
# As it stands engines of the tiny model never stop, on a CPU host; ASYNC_MODE=one-step generates one rollout ahead (docs/async.md).
#   MODEL=qwen3-8B HF_CHECKPOINT=… ACTOR_GPUS=8 ROLLOUT_GPUS=8 MAX_STALENESS=2 bash scripts/run-async.sh
# An evaluation with an engine of its own, beside training and syncs:
#   ENGINE_GPUS=1 bash scripts/run-async.sh --eval-async --eval-num-engines 1 --eval-interval 2 --eval-prompt-data held_out eval.jsonl
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ASYNC_MODE="${ASYNC_MODE:-full}"
MAX_STALENESS="${MAX_STALENESS:-1}"    # rollout steps; with ASYNC_MODE=full
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-async}"

ASYNC_ARGS=(--async-mode "${ASYNC_MODE}")
if [[ "${ASYNC_MODE}" == full ]]; then ASYNC_ARGS+=(--max-staleness "${MAX_STALENESS}"); fi
exec bash "${ROOT}/scripts/run-disaggregated.sh" "${ASYNC_ARGS[@]}" "$@"
