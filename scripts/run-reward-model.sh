#!/usr/bin/env bash
# A reward model beside a rule: reward = exact answer + REWARD_WEIGHT x what the model says of the whole sample. One GPU each for policy, reward
# model and engine. As it stands it runs on a CPU host, with a reward model whose weights are drawn from a seed.
# Takes the variables and flags of run-disaggregated.sh. What would run where: bash scripts/run-reward-model.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
REWARD_MODEL="${REWARD_MODEL:-}"            # HF folder: AutoModelForSequenceClassification with one output, and its tokenizer
REWARD_GPUS="${REWARD_GPUS:-1}"             # a whole copy on each
REWARD_WEIGHT="${REWARD_WEIGHT:-0.5}"
export ACTOR_GPUS="${ACTOR_GPUS:-1}" ROLLOUT_GPUS="${ROLLOUT_GPUS:-1}" ENGINE_GPUS="${ENGINE_GPUS:-1}" TP="${TP:-1}"
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-reward-model}"

source "${ROOT}/scripts/lib/run_common.sh"
tiny_reward

exec bash "${ROOT}/scripts/run-disaggregated.sh" \
  --reward-load "${REWARD_MODEL}" --reward-num-gpus-per-node "${REWARD_GPUS}" --reward-model-weight "${REWARD_WEIGHT}" \
  "${REWARD_ARGS[@]}" "$@"
