#!/usr/bin/env bash
# Episodes of many turns with an environment: trainer and engines take turns on the same GPUs (as run-colocate.sh).
# As it stands it lets an untrained tiny model play a guessing game on a CPU host, which it does not learn (run-agent.sh shows a reward that rises); set the
# variables for your own:
#   MODEL=qwen3-8B HF_CHECKPOINT=… ENVIRONMENT=my_package.my_module:MyEnvironment PROMPT_DATA=tasks.jsonl bash scripts/run-env.sh
# What would run where, without starting anything:
#   MODEL=qwen3-8B ACTOR_GPUS=8 ENGINE_GPUS=2 TP=2 bash scripts/run-env.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL="${MODEL:-tiny-qwen3}"           # a file of scripts/models
HF_CHECKPOINT="${HF_CHECKPOINT:-}"     # HF folder of the same model
ENVIRONMENT="${ENVIRONMENT:-scripts.examples.environments:Guess}"    # docs/agents.md: a class of yours, or textarena:…, reasoning-gym:…
PROMPT_DATA="${PROMPT_DATA-seeds:1000}"              # JSONL of tasks, or seeds where the environment makes its own
AGENT="${AGENT:-}"                     # instead of an environment: an agent of yours, run-served-agent.sh
MAX_TURNS="${MAX_TURNS:-4}"
NUM_ROLLOUT="${NUM_ROLLOUT:-3}"
MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-6}"            # of one answer
ACTOR_NODES="${ACTOR_NODES:-1}"
ACTOR_GPUS="${ACTOR_GPUS:-2}"          # on each node
ENGINE_GPUS="${ENGINE_GPUS:-1}"        # of one engine
TP="${TP:-1}"                          # how the trainer is split: tensor, pipeline, expert parallel size
PP="${PP:-1}"
EP="${EP:-1}"
RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-env}"

source "${ROOT}/scripts/lib/run_common.sh"
source "${ROOT}/scripts/models/${MODEL}.sh"
tiny_defaults

PLACEMENT_ARGS=(
  --actor-num-nodes "${ACTOR_NODES}"
  --actor-num-gpus-per-node "${ACTOR_GPUS}"
  --rollout-num-gpus-per-engine "${ENGINE_GPUS}"
  --colocate
)

if [[ -n "${AGENT}" ]]; then
  EPISODE_ARGS=(--serve-rollout --agent-path "${AGENT}" --agent-timeout-s 600)
else
  EPISODE_ARGS=(--env "${ENVIRONMENT}" --max-turns "${MAX_TURNS}" --env-timeout-s 60)
fi
EPISODE_ARGS+=(--sglang-router-policy manual)  # all turns of an episode go to one engine

ROLLOUT_ARGS=(
  --hf-checkpoint "${HF_CHECKPOINT}"
  --prompt-data "${PROMPT_DATA}"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
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
  --expert-model-parallel-size "${EP}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
)
if [[ "${TP}" -gt 1 ]]; then PERF_ARGS+=(--sequence-parallel); fi

ensure_ray "${RAY_GPUS:-4}"
submit \
  "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${EPISODE_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
  "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" --run-dir "${RUN_DIR}" "$@"
