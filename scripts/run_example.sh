#!/usr/bin/env bash
# One of scripts/examples, on this host's CPU:   bash scripts/run_example.sh NAME [train.py flags …]
# Makes the tiny models and data that its files name under runs/tiny, once, and starts a Ray of its own for the run. With --plan nothing is made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-${PWD}/.venv/bin/python}"
[[ -x "${PYTHON}" ]] || { printf 'run_example: no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }

NAME="${1:-}"
EXAMPLE="scripts/examples/${NAME}"
if [[ -z "${NAME}" || ! -f "${EXAMPLE}/run.toml" ]]; then
  printf 'run_example: no example %s. Known:%s\n' "'${NAME}'" "$(cd scripts/examples && printf ' %s' */)" >&2
  exit 2
fi
shift
FLAGS=(--config "${EXAMPLE}/run.toml" "$@")
for word in "$@"; do
  if [[ "${word}" == --plan || "${word}" == --plan=* ]]; then exec "${PYTHON}" train.py "${FLAGS[@]}"; fi
done

export RAY_ADDRESS="${RAY_ADDRESS:-local}" RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# need NAME FILE COMMAND…: run the command, which makes runs/tiny/NAME, if a file of the example names that and FILE is not in it.
need() {
  local name="$1" file="$2"
  shift 2
  if ! grep -qs "\"runs/tiny/${name}[/\"]" "${EXAMPLE}"/*.toml || [[ -f "runs/tiny/${name}/${file}" ]]; then return; fi
  "${PYTHON}" "$@"
}
need data train.jsonl scripts/make_tiny_data.py sort4 runs/tiny/data
need tiny-qwen3 model.safetensors scripts/make_tiny_model.py runs/tiny/tiny-qwen3
need tiny-qwen3-moe model.safetensors scripts/make_tiny_model.py runs/tiny/tiny-qwen3-moe --model models/tiny-qwen3-moe
need tiny-qwen3-blocks model.safetensors scripts/make_tiny_model.py runs/tiny/tiny-qwen3-blocks --model models/tiny-qwen3-blocks
need teacher model.safetensors scripts/make_tiny_model.py runs/tiny/teacher --seed 1
need reward-model model.safetensors scripts/make_tiny_model.py runs/tiny/reward-model --reward --seed 1

# What an example needs beside its files; may add to FLAGS and set a trap.
if [[ -f "${EXAMPLE}/before.sh" ]]; then
  source "${EXAMPLE}/before.sh"
  # In the background, so that a signal to this script is passed on at once. What is started there ignores Ctrl-C: it gets TERM instead.
  setpriv --pdeathsig TERM "${PYTHON}" train.py "${FLAGS[@]}" &
  RUN=$!
  trap 'kill -TERM "${RUN}"' TERM INT
  status=0
  wait "${RUN}" || status=$?
  while kill -0 "${RUN}" 2>/dev/null; do wait "${RUN}" || status=$?; done  # a signal ends `wait`, not the run
  exit "${status}"
fi
exec "${PYTHON}" train.py "${FLAGS[@]}"
