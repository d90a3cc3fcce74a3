#!/usr/bin/env bash
# A mixture of experts trained with the experts that ran (docs/routing-replay.md). Takes the variables and flags of run-colocate.sh; needs a
# checkpoint of MODEL in HF_CHECKPOINT (or --plan, which needs none).
# REPLAY=engine: what the engine's routers chose, which needs GPUs. REPLAY=trainer: what the pass before a rollout's first of four steps chose.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MODEL="${MODEL:-qwen3-30B-A3B}"
export ACTOR_GPUS="${ACTOR_GPUS:-8}" ENGINE_GPUS="${ENGINE_GPUS:-8}" TP="${TP:-4}" EP="${EP:-8}"
REPLAY="${REPLAY:-engine}"
case "${REPLAY}" in
  engine) REPLAY_ARGS=(--use-rollout-routing-replay) ;;
  trainer) REPLAY_ARGS=(--use-routing-replay --num-steps-per-rollout 4 --global-batch-size 8) ;;
  *) printf 'REPLAY=%s: engine or trainer.\n' "${REPLAY}" >&2; exit 2 ;;
esac
exec bash "${ROOT}/scripts/run-colocate.sh" "${REPLAY_ARGS[@]}" "$@"
