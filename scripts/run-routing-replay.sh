#!/usr/bin/env bash
# A mixture of experts trained with the experts that ran (docs/routing-replay.md). Takes the variables and flags of run-colocate.sh.
# As it stands it runs a tiny mixture of experts on a CPU host. A large one, without starting anything:
#   MODEL=qwen3-30B-A3B ACTOR_GPUS=8 ENGINE_GPUS=8 TP=4 EP=8 bash scripts/run-routing-replay.sh --plan
# REPLAY=engine: what the engine's routers chose. REPLAY=trainer: what the pass before a rollout's first of four steps chose.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MODEL="${MODEL:-tiny-qwen3-moe}"
export ACTOR_GPUS="${ACTOR_GPUS:-2}" ENGINE_GPUS="${ENGINE_GPUS:-1}" TP="${TP:-1}" EP="${EP:-2}"
REPLAY="${REPLAY:-engine}"
case "${REPLAY}" in
  engine) REPLAY_ARGS=(--use-rollout-routing-replay) ;;
  trainer) REPLAY_ARGS=(--use-routing-replay --num-steps-per-rollout 4 --global-batch-size 8) ;;
  *) printf 'REPLAY=%s: engine or trainer.\n' "${REPLAY}" >&2; exit 2 ;;
esac
exec bash "${ROOT}/scripts/run-colocate.sh" "${REPLAY_ARGS[@]}" "$@"
