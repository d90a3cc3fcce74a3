#!/usr/bin/env bash
# An engine on this host's CPU, started as somebody else would: SGLang's own command line, with the tiny model of the examples.
#   PORT=30000 bash scripts/examples/external/engine.sh          ends with Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export SGLANG_USE_CPU_ENGINE=1 SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The weight loader lets it take weights in one stream and prove them. On a GPU host: python -m sglang.launch_server, without the flags of the second line.
exec "${PYTHON:-.venv/bin/python}" -m slime_like.sglang_backend.cpu_server --model-path runs/tiny/tiny-qwen3 --host 127.0.0.1 --port "${PORT:-30000}" \
  --device cpu --dtype float32 --attention-backend torch_native --disable-overlap-schedule --sleep-on-idle --mem-fraction-static 0.3 --max-total-tokens 16384 \
  --skip-server-warmup --max-running-requests 64 --custom-weight-loader slime_like.weight_sync.in_engine.shm_loader.load
