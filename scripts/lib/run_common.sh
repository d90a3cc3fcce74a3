# Sourced by the run-*.sh examples: what they share. Needs ROOT and MODEL; gives PYTHON, RAY, TINY, tiny_defaults, ensure_ray, submit.
# With --plan among the script's arguments nothing is made, started or submitted: train.py prints the plan.
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
RAY="${RAY:-${ROOT}/.venv/bin/ray}"
RAY_JOB_ADDRESS="${RAY_JOB_ADDRESS:-http://127.0.0.1:8265}"
TINY="${TINY:-${ROOT}/runs/tiny}"  # where the tiny models and their data are made
# Ray 2.60: once a local Ray has left a token here, `ray start` asks for one, but `ray job submit` sends it only in this mode.
if [[ -z "${RAY_AUTH_MODE:-}" && -f "${HOME}/.ray/auth_token" ]]; then export RAY_AUTH_MODE=token; fi

[[ -x "${PYTHON}" ]] || { printf 'no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }

PLAN_ONLY=""
for word in "$@"; do if [[ "${word}" == --plan ]]; then PLAN_ONLY=yes; fi; done

# Without a checkpoint of your own: a tiny model and its data, made once.
tiny_defaults() {
  if [[ -n "${PLAN_ONLY}" ]]; then
    HF_CHECKPOINT="${HF_CHECKPOINT:-/nowhere/${MODEL}}"  # a plan needs no file
    PROMPT_DATA="${PROMPT_DATA:-/nowhere/train.jsonl}"
    return
  fi
  if [[ -z "${HF_CHECKPOINT}" && "${MODEL}" != tiny-* ]]; then
    printf 'set HF_CHECKPOINT to the folder of %s (or add --plan, which needs none).\n' "${MODEL}" >&2
    exit 2
  fi
  if [[ -z "${HF_CHECKPOINT}" ]]; then
    HF_CHECKPOINT="${TINY}/${MODEL}"
    [[ -f "${HF_CHECKPOINT}/model.safetensors" ]] || "${PYTHON}" "${ROOT}/scripts/make_tiny_model.py" "${HF_CHECKPOINT}" --model "${ROOT}/models/${MODEL}"
  fi
  if [[ -z "${PROMPT_DATA}" ]]; then
    PROMPT_DATA="${TINY}/data/train.jsonl"
    [[ -f "${PROMPT_DATA}" ]] || "${PYTHON}" "${ROOT}/scripts/make_tiny_data.py" sort4 "${TINY}/data"
  fi
}

# ensure_ray NUM_GPUS: start a Ray head on this host unless a cluster's job server answers already.
ensure_ray() {
  if [[ -n "${PLAN_ONLY}" ]]; then return; fi
  local host_port="${RAY_JOB_ADDRESS#*://}"
  if (exec 3<>"/dev/tcp/${host_port%%:*}/${host_port##*:}") 2>/dev/null; then return; fi
  "${RAY}" start --head --node-ip-address 127.0.0.1 --num-gpus "$1" --disable-usage-stats
  printf 'Ray stays up for the next run; "%s stop" ends it.\n' "${RAY}"
}

# submit TRAIN_FLAGS...: run train.py as a Ray job and wait for it. Jobs have no working directory of ours, hence the absolute paths.
submit() {
  if [[ -n "${PLAN_ONLY}" ]]; then exec "${PYTHON}" "${ROOT}/train.py" "$@"; fi
  "${RAY}" job submit --address="${RAY_JOB_ADDRESS}" \
    --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}}' \
    -- "${PYTHON}" "${ROOT}/train.py" "$@"
}
