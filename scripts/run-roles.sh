#!/usr/bin/env bash
# Roles on GPUs of their own: critic, reference and reward model stand beside the policy and the engines, all counts set one by one.
# Takes the variables and flags of run-disaggregated.sh. What would run where: bash scripts/run-roles.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CRITIC_GPUS="${CRITIC_GPUS:-2}"             # on each of the actor's number of nodes, as the two below
REF_GPUS="${REF_GPUS:-2}"
REWARD_GPUS="${REWARD_GPUS:-2}"
REWARD_MODEL="${REWARD_MODEL:-/nowhere/reward-model}"   # HF folder; docs/rewards.md
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-roles}"
exec bash "${ROOT}/scripts/run-disaggregated.sh" \
  --advantage-estimator ppo --critic-num-gpus-per-node "${CRITIC_GPUS}" \
  --no-colocate-policy-ref --ref-num-gpus-per-node "${REF_GPUS}" \
  --reward-load "${REWARD_MODEL}" --reward-num-gpus-per-node "${REWARD_GPUS}" "$@"
