#!/usr/bin/env bash
# One algorithm of docs/algorithms.md:   ALGORITHM=icepop bash scripts/run-algorithms.sh [train.py flags …]
# Takes the variables of run-colocate.sh; as it stands it runs the tiny model on a CPU host.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ALGORITHM="${ALGORITHM:-reinforce++}"    # reinforce++ reinforce++-baseline dr-grpo icepop sequence-masking distillation
TEACHER="${TEACHER:-}"                   # for distillation: folder of a model of the same architecture
case "${ALGORITHM}" in
  reinforce++)          ALGORITHM_ARGS=(--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.01) ;;
  reinforce++-baseline) ALGORITHM_ARGS=(--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.01) ;;
  dr-grpo)              ALGORITHM_ARGS=(--disable-grpo-std-normalization --loss-reduction constant --loss-divisor "${MAX_RESPONSE_LEN:-6}") ;;
  icepop)               ALGORITHM_ARGS=(--use-tis --tis-mode mask --tis-clip-low 0.5 --tis-clip 2.0 --get-mismatch-metrics) ;;
  sequence-masking)     ALGORITHM_ARGS=(--use-rollout-logprobs --use-opsm --opsm-delta 1e-4 --use-unbiased-kl --kl-loss-coef 0.001) ;;
  distillation)
    if [[ -z "${TEACHER}" ]]; then printf 'set TEACHER to the folder of the teacher.\n' >&2; exit 2; fi
    ALGORITHM_ARGS=(--use-opd --opd-teacher-load "${TEACHER}" --opd-kl-coef 1.0) ;;
  *) printf 'no algorithm %s. Known: reinforce++ reinforce++-baseline dr-grpo icepop sequence-masking distillation.\n' "${ALGORITHM}" >&2; exit 2 ;;
esac
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-${ALGORITHM}}"
exec bash "${ROOT}/scripts/run-colocate.sh" "${ALGORITHM_ARGS[@]}" "$@"
