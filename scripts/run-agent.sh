#!/usr/bin/env bash
# An agent with a tool, a calculator: run-env.sh with another environment and its rows. The same variables; flags are passed on.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
TINY="${TINY:-${ROOT}/runs/tiny}"

export ENVIRONMENT="${ENVIRONMENT:-scripts.examples.environments:Calculator}"    # …:Calculator?tags=false for a model whose chat template knows tools
export MAX_RESPONSE_LEN="${MAX_RESPONSE_LEN:-16}"
if [[ -z "${PROMPT_DATA:-}" ]]; then
  export PROMPT_DATA="${TINY}/calculator-data/train.jsonl"
  [[ " $* " == *" --plan"* || -f "${PROMPT_DATA}" ]] || "${PYTHON}" "${ROOT}/scripts/examples/calculator/make_data.py" "${TINY}/calculator-data"
fi
exec bash "${ROOT}/scripts/run-env.sh" "$@"
