#!/usr/bin/env bash
# An agent with a tool, a calculator: run-env.sh with another environment and its rows. The same variables; flags are passed on.
# As it stands a tiny model, warmed up on scripted episodes once, learns to use the calculator: a reward that rises, some five minutes on two cores.
#   SEED=1 bash scripts/run-agent.sh        another model, other rows, other samples
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
TINY="${TINY:-${ROOT}/runs/tiny}"
SEED="${SEED:-0}"
FLAGS=("$@")

export ENVIRONMENT="${ENVIRONMENT:-scripts.examples.environments:Calculator}"    # …:Calculator?tags=false for a model whose chat template knows tools
export MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-16}"
export RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-agent}"
DATA="${TINY}/calculator-seed${SEED}"
LEARNS=""
if [[ -z "${HF_CHECKPOINT:-}${MODEL:-}" && " $* " != *" --plan"* ]]; then
  LEARNS=yes
  bash "${ROOT}/scripts/examples/calculator/warm_up.sh" "${DATA}" "${SEED}"
  export HF_CHECKPOINT="${DATA}/model" ACTOR_GPUS="${ACTOR_GPUS:-1}" NUM_ROLLOUT="${NUM_ROLLOUT:-40}"
  # Those of scripts/examples/calculator/run.toml.
  FLAGS=(--rollout-batch-size 16 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --global-batch-size 64 --lr 2e-4
    --seed "${SEED}" --rollout-seed "${SEED}" "$@")
fi
if [[ -z "${PROMPT_DATA:-}" ]]; then
  export PROMPT_DATA="${DATA}/data/train.jsonl"
  [[ " $* " == *" --plan"* || -f "${PROMPT_DATA}" ]] || "${PYTHON}" "${ROOT}/scripts/examples/calculator/make_data.py" "${DATA}/data" --seed "${SEED}"
fi
bash "${ROOT}/scripts/run-env.sh" "${FLAGS[@]}"
if [[ -n "${LEARNS}" ]]; then exec "${PYTHON}" "${ROOT}/scripts/show_rise.py" "${RUN_DIR}" --least-rise 0.35 --least-rollouts 40; fi
