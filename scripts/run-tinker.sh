#!/usr/bin/env bash
# A Tinker server and a client of it, in one command: RL on "sort four digits" by scripts/examples/tinker-rl/rl.py. On a CPU host, as it stands:
#   bash scripts/run-tinker.sh                             warms the tiny model up (once), serves it, trains an adapter, prints the rewards
#   BASE_MODEL=/models/Qwen3-8B ACTOR_GPUS=4 ENGINES=2 ENGINE_GPUS=2 CLIENT= bash scripts/run-tinker.sh         only the server, for clients elsewhere
#   … --plan                                               what would run where; flags are passed on to the server
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "${ROOT}"
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
[[ -x "${PYTHON}" ]] || { printf 'run-tinker: no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }
PATH="$(dirname "${PYTHON}"):${PATH}"
TINY="${TINY:-${ROOT}/runs/tiny}"
SEED="${SEED:-0}"
STEPS="${STEPS:-40}"                  # of the client
RANK="${RANK:-32}"
PORT="${PORT:-0}"
STATE="${STATE:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-tinker}"
CLIENT="${CLIENT-${ROOT}/scripts/examples/tinker-rl/rl.py}"      # CLIENT= : none
CLIENT_PYTHON="${CLIENT_PYTHON:-${TINY}/tinker-sdk/bin/python}"  # an interpreter with the SDK; made where it is not there
export RAY_ADDRESS="${RAY_ADDRESS:-local}" RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

CONFIG="$(printf '{"trainer.placement.policy_num_gpus_per_node": %d, "generator.inference_engine.num_engines": %d, "generator.inference_engine.tensor_parallel_size": %d}' \
  "${ACTOR_GPUS:-1}" "${ENGINES:-1}" "${ENGINE_GPUS:-1}")"
SERVER=("${PYTHON}" -m slime_like.tinker.server --backend megatron --backend-config "${CONFIG}" --port "${PORT}" --state-folder "${STATE}" --max-lora-rank "${MAX_RANK:-32}")
for word in "$@"; do
  if [[ "${word}" == --plan || "${word}" == --plan=* ]]; then exec "${SERVER[@]}" --base-model "${BASE_MODEL:-models/tiny-qwen3}" "$@"; fi
done

if [[ -z "${BASE_MODEL:-}" ]]; then
  WARM="${TINY}/sort4-seed${SEED}"
  [[ -f "${WARM}/data/train.jsonl" ]] || "${PYTHON}" scripts/make_tiny_data.py sort4 "${WARM}/data" --seed "${SEED}"
  if [[ ! -f "${WARM}/model/config.json" ]]; then
    # The quickstart's warm-up: right in a third of the rows.
    rm -rf "${WARM}/start" "${WARM}/run" "${WARM}/checkpoints" "${WARM}/model.part"
    "${PYTHON}" scripts/make_tiny_model.py "${WARM}/start" --seed "${SEED}"
    "${PYTHON}" train.py --loss-type sft_loss --hf-checkpoint "${WARM}/start" --prompt-data "${WARM}/data/sft.jsonl" --input-key prompt --label-key label --apply-chat-template \
      --use-dynamic-batch-size --max-tokens-per-gpu 4096 --adam-beta2 0.98 --clip-grad 1.0 --seed "${SEED}" --rollout-seed "${SEED}" --num-rollout 200 --rollout-batch-size 64 \
      --lr 1e-3 --lr-warmup-iters 10 --actor-num-gpus-per-node 1 --save "${WARM}/checkpoints" --save-hf "${WARM}/model.part" --run-dir "${WARM}/run"
    mv "${WARM}/model.part" "${WARM}/model"
  fi
  BASE_MODEL="${WARM}/model"
  PROMPT_DATA="${PROMPT_DATA:-${WARM}/data/train.jsonl}"
fi
SERVER+=(--base-model "${BASE_MODEL}" "$@")
[[ -n "${CLIENT}" ]] || exec "${SERVER[@]}"

if [[ ! -x "${CLIENT_PYTHON}" ]]; then
  "${PYTHON}" -m venv "$(dirname "$(dirname "${CLIENT_PYTHON}")")"
  "${CLIENT_PYTHON}" -m pip install --quiet tinker==0.38.0 jinja2
fi
mkdir -p "${STATE}"
setpriv --pdeathsig TERM "${SERVER[@]}" > "${STATE}/server.log" 2>&1 &
SERVER_PID=$!
trap 'kill -TERM "${SERVER_PID}" 2>/dev/null; wait "${SERVER_PID}" || true' EXIT
URL=""
for ((i = 0; i < 1500; i++)); do
  URL="$(sed -n 's/^serving .* at \(http[^ ]*\)$/\1/p' "${STATE}/server.log")"
  [[ -z "${URL}" ]] || break
  kill -0 "${SERVER_PID}" 2>/dev/null || { tail -20 "${STATE}/server.log" >&2; exit 1; }
  sleep 0.2
done
[[ -n "${URL}" ]] || { printf 'run-tinker: the server is not up after 300 s; see %s/server.log\n' "${STATE}" >&2; exit 1; }
printf 'run-tinker: %s; its log is %s/server.log\n' "${URL}" "${STATE}"
TINKER_API_KEY="${TINKER_API_KEY:-tml-local}" TINKER_TELEMETRY=0 "${CLIENT_PYTHON}" "${CLIENT}" "${URL}" "${BASE_MODEL}" "${PROMPT_DATA}" "${STEPS}" "${RANK}"
