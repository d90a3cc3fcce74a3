#!/usr/bin/env bash
# An interleaved pipeline: two stages of two chunks of layers each, collectives that overlap with the passes, one engine; GPUs apart.
# As it stands it runs the tiny model on a CPU host with 3 logical GPUs; set the variables for your own.
# What would run where, without starting anything:
#   MODEL=qwen3-8B ACTOR_GPUS=8 TP=2 PP=4 CHUNKS=3 ROLLOUT_GPUS=8 bash scripts/run-interleaved.sh --plan
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

CHUNKS="${CHUNKS:-2}"                  # of each pipeline stage's layers
export ACTOR_GPUS="${ACTOR_GPUS:-2}" ROLLOUT_GPUS="${ROLLOUT_GPUS:-1}" ENGINE_GPUS="${ENGINE_GPUS:-1}"
export TP="${TP:-1}" PP="${PP:-2}" RUN_DIR="${RUN_DIR:-${ROOT}/runs/$(date +%Y%m%d-%H%M%S)-interleaved}"

exec bash "${ROOT}/scripts/run-disaggregated.sh" \
  --num-virtual-stages-per-pipeline-rank "${CHUNKS}" --overlap-grad-reduce --overlap-param-gather "$@"
