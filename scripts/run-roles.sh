#!/usr/bin/env bash
# Roles on GPUs of their own: critic, reference and reward model stand beside the policy and the engines, all counts set one by one.
# As it stands it runs the tiny model on a CPU host with 5 logical GPUs, the reward model with weights drawn from a seed.
# Takes the variables and flags of run-disaggregated.sh. What would run where: bash scripts/run-roles.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CRITIC_GPUS="${CRITIC_GPUS:-1}"             # on each of the actor's number of nodes, as the two below
REF_GPUS="${REF_GPUS:-1}"
REWARD_GPUS="${REWARD_GPUS:-1}"
REWARD_MODEL="${REWARD_MODEL:-}"            # HF folder; docs/rewards.md
export ACTOR_GPUS="${ACTOR_GPUS:-1}" ROLLOUT_GPUS="${ROLLOUT_GPUS:-1}" ENGINE_GPUS="${ENGINE_GPUS:-1}" TP="${TP:-1}" RAY_GPUS="${RAY_GPUS:-5}"
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-roles}"

source "${ROOT}/scripts/lib/run_common.sh"
tiny_reward

exec bash "${ROOT}/scripts/run-disaggregated.sh" \
  --advantage-estimator ppo --critic-num-gpus-per-node "${CRITIC_GPUS}" \
  --no-colocate-policy-ref --ref-num-gpus-per-node "${REF_GPUS}" \
  --reward-load "${REWARD_MODEL}" --reward-num-gpus-per-node "${REWARD_GPUS}" "${REWARD_ARGS[@]}" "$@"
