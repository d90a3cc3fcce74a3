#!/usr/bin/env bash
# External: two trainer ranks, and engines that somebody else started; no GPU is reserved for those.
# As it stands it runs the tiny model on a CPU host with 4 logical GPUs; set the variables for your own.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

MODEL="${MODEL:-tiny-qwen3}"           # a file of scripts/models
HF_CHECKPOINT="${HF_CHECKPOINT:-}"     # HF folder of the same model
PROMPT_DATA="${PROMPT_DATA:-}"         # JSONL
RM_TYPE="${RM_TYPE:-exact}"
CUSTOM_RM_PATH="${CUSTOM_RM_PATH:-}"   # module.function, instead of RM_TYPE
NUM_ROLLOUT="${NUM_ROLLOUT:-3}"
MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-6}"
RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-external}"
ENGINE_ADDRS="${ENGINE_ADDRS:-}"       # host:port of each running engine, separated by blanks
# An engine that has an API key: export SLIME_LIKE_ENGINE_API_KEY before `ray start`, so that the key is on no command line.

source "${ROOT}/scripts/lib/run_common.sh"
source "${ROOT}/scripts/models/${MODEL}.sh"
tiny_defaults

if [[ -z "${ENGINE_ADDRS}" ]]; then
  LOADER="--custom-weight-loader slime_like.weight_sync.in_engine.shm_loader.load"
  cat >&2 <<TEXT
Set ENGINE_ADDRS to the engines' host:port. One is started by hand with SGLang's own command line,
on a GPU host:
  python -m sglang.launch_server --model-path ${HF_CHECKPOINT} --host 127.0.0.1 --port 30000 ${LOADER}
on a CPU host:
  SGLANG_USE_CPU_ENGINE=1 SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 \\
  ${PYTHON} -m slime_like.sglang_backend.cpu_server --model-path ${HF_CHECKPOINT} --host 127.0.0.1 --port 30000 \\
    --device cpu --dtype float32 --attention-backend torch_native --disable-overlap-schedule --skip-server-warmup --sleep-on-idle \\
    --mem-fraction-static 0.3 --max-running-requests 64 --max-total-tokens 16384 ${LOADER}
The last flag lets it take weights in one stream, and prove them; it needs this package where the engine runs, and may be left out.
then:  ENGINE_ADDRS=127.0.0.1:30000 bash scripts/run-external.sh
TEXT
  exit 2
fi
read -r -a ADDRESSES <<<"${ENGINE_ADDRS}"

PLACEMENT_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 2
  --rollout-num-gpus-per-engine 1
  --rollout-external
  --rollout-external-engine-addrs "${ADDRESSES[@]}"
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
  --num-rollout "${NUM_ROLLOUT}"
  --rollout-batch-size 8
  --n-samples-per-prompt 4
  --num-steps-per-rollout 1
  --global-batch-size 32
  --rollout-max-response-len "${MAX_RESPONSE_LEN}"
  --rollout-temperature 1
)

REWARD_ARGS=(--rm-type "${RM_TYPE}")
if [[ -n "${CUSTOM_RM_PATH}" ]]; then REWARD_ARGS=(--custom-rm-path "${CUSTOM_RM_PATH}"); fi

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
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
)

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
  "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${REWARD_ARGS[@]}" \
  "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
