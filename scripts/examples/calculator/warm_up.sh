#!/usr/bin/env bash
# Makes a tiny model that has seen the calculator being used, among other things, and the rows that it is trained on:
#   bash scripts/examples/calculator/warm_up.sh OUT [SEED]   ->   OUT/data, OUT/model; once (WARM_UP_STEPS=200)
# A model with weights from the seed, and our own supervised loop on scripted episodes, in a Ray of its own.
set -euo pipefail
OUT="${1:?usage: warm_up.sh OUT [SEED]}" SEED="${2:-0}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
if [[ -f "${OUT}/model/model.safetensors.index.json" ]]; then exit 0; fi

printf 'Warming a tiny model up with the calculator, once: %s\n' "${OUT}"
export RAY_ADDRESS=local RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"${PYTHON}" "${ROOT}/scripts/examples/calculator/make_data.py" "${OUT}/data" --seed "${SEED}"
"${PYTHON}" "${ROOT}/scripts/make_tiny_model.py" "${OUT}/start" --seed "${SEED}"
"${PYTHON}" "${ROOT}/train.py" --loss-type sft_loss --hf-checkpoint "${OUT}/start" --prompt-data "${OUT}/data/sft.jsonl" \
  --input-key prompt --label-key label --apply-chat-template --num-rollout "${WARM_UP_STEPS:-200}" --rollout-batch-size 64 \
  --actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 1e-3 --lr-warmup-iters 10 --adam-beta2 0.98 \
  --seed "${SEED}" --rollout-seed "${SEED}" \
  --save "${OUT}/warm-up/checkpoints" --no-save-optim --save-hf "${OUT}/model" --run-dir "${OUT}/warm-up"
