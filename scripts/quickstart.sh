#!/usr/bin/env bash
# From a fresh clone to a rising reward on CPU: sets up .venv, warms a tiny Qwen3 up, trains it with GRPO.
#   bash scripts/quickstart.sh [--seed N] [--rollouts N]
# Ends with status 1 if the reward rose by less than 0.4 (not judged below 20 rollouts).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SEED=0
NUM_ROLLOUT=40

usage() { printf 'quickstart: %s\nusage: bash scripts/quickstart.sh [--seed N] [--rollouts N]\n' "$1" >&2; exit 2; }
while (($#)); do
  [[ "${2:-}" =~ ^[0-9]+$ ]] || usage "$1 needs a number"
  case "$1" in
    --seed) SEED=$2 ;;
    --rollouts) NUM_ROLLOUT=$2 ;;
    *) usage "unknown option $1" ;;
  esac
  shift 2
done
((NUM_ROLLOUT >= 1)) || usage "--rollouts must be at least 1"

bash scripts/setup.sh
PATH="${PWD}/.venv/bin:${PATH}"
# A Ray of its own, unless told which one to join: whatever else runs on this host may be full, or ask for a token.
export RAY_ADDRESS="${RAY_ADDRESS:-local}"
# Nothing is fetched from a model hub nor reported to anyone; few cores are shared by several processes.
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

RUN="runs/quickstart-$(date +%Y%m%d-%H%M%S)-seed${SEED}"
mkdir -p "${RUN}"
python scripts/make_tiny_model.py "${RUN}/model" --seed "${SEED}"
python scripts/make_tiny_data.py sort4 "${RUN}/data" --seed "${SEED}"

COMMON_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --input-key prompt
  --label-key label
  --apply-chat-template
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
  --optimizer adam
  --adam-beta1 0.9
  --adam-beta2 0.98
  --clip-grad 1.0
  --seed "${SEED}"
  --rollout-seed "${SEED}"
)

WARM_UP_ARGS=(
  --loss-type sft_loss
  --hf-checkpoint "${RUN}/model"
  --prompt-data "${RUN}/data/sft.jsonl"
  --num-rollout 200
  --rollout-batch-size 64
  --lr 1e-3
  --lr-warmup-iters 10
  --save "${RUN}/warm-up/checkpoints"
  --save-hf "${RUN}/warm-up/hf"
  --no-save-optim
  --run-dir "${RUN}/warm-up"
)

GRPO_ARGS=(
  --colocate
  --no-offload-rollout                             # on a CPU SGLang gives no memory back; asking takes 20 ms a step
  --rollout-num-gpus-per-engine 1
  --hf-checkpoint "${RUN}/warm-up/hf"
  --prompt-data "${RUN}/data/train.jsonl"
  --rollout-shuffle
  --num-rollout "${NUM_ROLLOUT}"
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --num-steps-per-rollout 2
  --rollout-max-response-len 6
  --rollout-temperature 1.0
  --rm-type exact
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --lr 2e-4
  --lr-warmup-iters 6
  --eval-prompt-data sort4 "${RUN}/data/eval.jsonl"
  --eval-interval 10
  --run-dir "${RUN}/grpo"
)

printf '\nquickstart 1/2: supervised warm-up on "sort four digits"; right in 35 %% of the rows, else a copy, the reverse or descending order\n'
python train.py "${COMMON_ARGS[@]}" "${WARM_UP_ARGS[@]}"

printf '\nquickstart 2/2: GRPO, %d rollouts of 32 prompts x 8 samples; reward 1 for the exact answer, else 0\n' "${NUM_ROLLOUT}"
python train.py "${COMMON_ARGS[@]}" "${GRPO_ARGS[@]}"

status=0
python scripts/show_rise.py "${RUN}/grpo" --least-rise 0.4 --least-rollouts 20 || status=$?
printf 'quickstart: %d s in all\n' "${SECONDS}"
exit "${status}"
