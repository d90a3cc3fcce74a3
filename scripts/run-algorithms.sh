#!/usr/bin/env bash
# One algorithm of docs/algorithms.md:   ALGORITHM=icepop bash scripts/run-algorithms.sh [train.py flags …]
# Takes the variables of run-colocate.sh; as it stands it runs the tiny model on a CPU host.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ALGORITHM="${ALGORITHM:-reinforce++}"    # one of the names below
TEACHER="${TEACHER:-}"                   # for distillation: folder of a model of the same architecture
case "${ALGORITHM}" in
  reinforce++)          ALGORITHM_ARGS=(--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.01) ;;
  reinforce++-baseline) ALGORITHM_ARGS=(--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.01) ;;
  dr-grpo)              ALGORITHM_ARGS=(--advantage-estimator dr_grpo --loss-reduction constant --loss-divisor "${MAX_RESPONSE_LEN:-6}") ;;
  icepop)               ALGORITHM_ARGS=(--use-tis --tis-mode mask --tis-clip-low 0.5 --tis-clip 2.0 --get-mismatch-metrics) ;;
  lite-ppo)             ALGORITHM_ARGS=(--advantage-estimator grpo_batch_std --loss-reduction token) ;;
  rloo-cispo)           ALGORITHM_ARGS=(--advantage-estimator rloo --policy-loss cispo) ;;
  gmpo)                 ALGORITHM_ARGS=(--policy-loss gmpo --eps-clip 0.4 --eps-clip-high 0.4) ;;
  sapo)                 CLIP_FLAGS="" ALGORITHM_ARGS=(--policy-loss sapo --sapo-temperature-pos 1.0 --sapo-temperature-neg 1.05) ;;
  clip-cov)             ALGORITHM_ARGS=(--policy-loss clip_cov --eps-clip 1.0 --eps-clip-high 1.0 --clip-cov-ratio 0.01 --clip-cov-lb 0.1) ;;
  kl-cov)               CLIP_FLAGS="" ALGORITHM_ARGS=(--policy-loss kl_cov --kl-cov-ratio 0.02 --use-rollout-logprobs) ;;
  rejection)            ALGORITHM_ARGS=(--use-tis --tis-clip 2.0 --tis-reject-level geometric --tis-reject-low 0.99 --tis-reject-high 1.01) ;;
  sequence-masking)     ALGORITHM_ARGS=(--use-opsm --opsm-delta 1e-4 --use-unbiased-kl --kl-loss-coef 0.001) ;;
  distillation)
    if [[ -z "${TEACHER}" ]]; then printf 'set TEACHER to the folder of the teacher.\n' >&2; exit 2; fi
    ALGORITHM_ARGS=(--use-opd --opd-teacher-load "${TEACHER}" --opd-kl-coef 1.0) ;;
  *) printf 'no algorithm %s. Known: reinforce++ reinforce++-baseline dr-grpo lite-ppo rloo-cispo gmpo sapo clip-cov kl-cov icepop rejection sequence-masking distillation.\n' "${ALGORITHM}" >&2; exit 2 ;;
esac
export CLIP_FLAGS="${CLIP_FLAGS---eps-clip 0.2 --eps-clip-high 0.28}"
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-${ALGORITHM}}"
exec bash "${ROOT}/scripts/run-colocate.sh" "${ALGORITHM_ARGS[@]}" "$@"
