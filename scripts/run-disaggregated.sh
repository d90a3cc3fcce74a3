#!/usr/bin/env bash
# Disaggregated: two trainer ranks and one engine with tensor parallel size 2 on two more GPUs; weights are broadcast.
# As it stands it runs the tiny model on a CPU host with 4 logical GPUs; set the variables for your own.
# What would run where, without starting anything:
#   MODEL=qwen3-8B ACTOR_GPUS=8 ROLLOUT_GPUS=8 bash scripts/run-disaggregated.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL="${MODEL:-tiny-qwen3}"           # a file of scripts/models
HF_CHECKPOINT="${HF_CHECKPOINT:-}"     # HF folder of the same model
PROMPT_DATA="${PROMPT_DATA:-}"         # JSONL
RM_TYPE="${RM_TYPE:-exact}"
NUM_ROLLOUT="${NUM_ROLLOUT:-3}"
MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-6}"
ACTOR_NODES="${ACTOR_NODES:-1}"
ACTOR_GPUS="${ACTOR_GPUS:-2}"          # on each node
ROLLOUT_GPUS="${ROLLOUT_GPUS:-2}"      # of all engines
ENGINE_GPUS="${ENGINE_GPUS:-2}"        # of one engine
TP="${TP:-2}"                          # how the trainer is split: tensor, pipeline, expert parallel size
PP="${PP:-1}"
EP="${EP:-1}"
RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-disaggregated}"

source "${ROOT}/scripts/lib/run_common.sh"
source "${ROOT}/scripts/models/${MODEL}.sh"
tiny_defaults

PLACEMENT_ARGS=(
  --actor-num-nodes "${ACTOR_NODES}"
  --actor-num-gpus-per-node "${ACTOR_GPUS}"
  --rollout-num-gpus "${ROLLOUT_GPUS}"
  --rollout-num-gpus-per-engine "${ENGINE_GPUS}"
)

CKPT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --ref-load "${HF_CHECKPOINT}"
)

ROLLOUT_ARGS=(
  --prompt-data "${PROMPT_DATA}"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
  --rm-type "${RM_TYPE}"
  --num-rollout "${NUM_ROLLOUT}"
  --rollout-batch-size 8
  --n-samples-per-prompt 4
  --num-steps-per-rollout 1
  --global-batch-size 32
  --rollout-max-response-len "${MAX_RESPONSE_LEN}"
  --rollout-temperature 1
)

GRPO_ARGS=(
  --advantage-estimator grpo
  --use-kl-loss
  --kl-loss-coef 0.00
  --kl-loss-type low_var_kl
  --entropy-coef 0.00
  --eps-clip 0.2
  --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)

PERF_ARGS=(
  --tensor-model-parallel-size "${TP}"
  --pipeline-model-parallel-size "${PP}"
  --context-parallel-size 1
  --expert-model-parallel-size "${EP}"
  --expert-tensor-parallel-size 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
)
if [[ "${TP}" -gt 1 ]]; then PERF_ARGS+=(--sequence-parallel); fi

MISC_ARGS=(
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend auto
  --run-dir "${RUN_DIR}"
)

ensure_ray "${RAY_GPUS:-4}"
submit \
  "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
  "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
