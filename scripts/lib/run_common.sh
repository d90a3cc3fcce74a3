# Sourced by the run-*.sh examples: what they share. Needs ROOT and MODEL; gives PYTHON, RAY, TINY, tiny_defaults, ensure_ray, submit.
# With --plan among the script's arguments nothing is made, started or submitted: train.py prints the plan.
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
RAY="${RAY:-${ROOT}/.venv/bin/ray}"
RAY_JOB_ADDRESS="${RAY_JOB_ADDRESS:-}"  # of the job server; empty: ours on this host, started if there is none
RAY_JOB_OWNER="${RAY_JOB_OWNER:-${EUID}}"  # the user whose job server on this host is trusted, besides root
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

# listeners PORT: the users (numbers) whose processes listen on a TCP port of this host, one a line.
listeners() {
  { cat /proc/net/tcp /proc/net/tcp6 2>/dev/null || true; } |
    awk -v port="$(printf '%04X' "$1")" '$4 == "0A" && substr($2, length($2) - 3) == port { print $8 }' | sort -u
}

# trusted PORT: whether somebody listens there, and nobody but root and the trusted user.
trusted() {
  local uid uids
  uids="$(listeners "$1")"
  for uid in ${uids}; do if [[ "${uid}" != 0 && "${uid}" != "${RAY_JOB_OWNER}" ]]; then return 1; fi; done
  [[ -n "${uids}" ]]
}

# The folder of a Ray that we start, which only we can enter: Ray opens /tmp/ray to everyone. slime_like/cluster/ray_trust.py looks here too.
ray_folder() {
  local root="${RAY_TMPDIR:-/tmp}"
  local folder="${root}/slime_like-${EUID}"
  mkdir -m 700 "${folder}" 2>/dev/null || true
  if [[ -L "${folder}" || ! -d "${folder}" || ! -O "${folder}" || "$(stat -c %a "${folder}")" != 700 || ( ! -k "${root}" && ! -O "${root}" ) ]]; then
    printf '%s is not a folder that only you can enter. Fix: RAY_TMPDIR, a short path to a folder of yours.\n' "${folder}" >&2
    return 2
  fi
  printf '%s\n' "${folder}"
}

# The key that a Ray of ours asks for, readable by us alone. Without one, every user of this host could give Ray work to do as us.
ray_token() {
  if [[ "${RAY_AUTH_MODE:-token}" != token ]]; then return; fi
  export RAY_AUTH_MODE=token
  if [[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]]; then return; fi
  local file="${HOME}/.ray/auth_token"
  if [[ ! -e "${file}" ]]; then
    (umask 077; mkdir -p "${HOME}/.ray"; set -o noclobber; od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' > "${file}")
  fi
  chmod 700 "${HOME}/.ray"
  chmod 600 "${file}"
}

# ensure_ray NUM_GPUS: find the job server to use, or start a Ray head on this host; RAY_JOB_ADDRESS is it. Who is sent our token is checked before:
# a server on this host must be ours or root's, else ours is started beside it. One on another host is trusted if RAY_JOB_ADDRESS names it.
ensure_ray() {
  if [[ -n "${PLAN_ONLY}" ]]; then return; fi
  local folder host port ports address="${RAY_JOB_ADDRESS:-http://127.0.0.1:8265}"
  host="${address#*://}" host="${host%%/*}" port="${host##*:}" host="${host%:*}"
  case "${host}" in
    127.* | localhost | "[::1]") ;;
    *) return ;;
  esac
  if [[ ! "${port}" =~ ^[0-9]+$ ]]; then printf 'RAY_JOB_ADDRESS %s has no port.\n' "${address}" >&2; exit 2; fi
  if trusted "${port}"; then RAY_JOB_ADDRESS="${address}"; return; fi
  folder="$(ray_folder)" || exit 2
  if [[ -f "${folder}/job_port" ]] && trusted "$(< "${folder}/job_port")"; then
    RAY_JOB_ADDRESS="http://127.0.0.1:$(< "${folder}/job_port")"
    return
  fi
  ports=(--dashboard-port "${port}")
  if [[ -n "$(listeners "${port}"; listeners 6379; listeners 10001; listeners 52365)" ]]; then  # Ray's own choices
    if [[ -n "$(listeners "${port}")" ]]; then
      printf 'at port %s another user of this host listens (%s), who is not sent our token: a Ray of ours is started beside it.\n' \
        "${port}" "$(listeners "${port}" | tr '\n' ' ')" >&2
    fi
    # Below the kernel's own range: there any outgoing connection may take a port before Ray binds it.
    read -r -a ports < <("${PYTHON}" -I -S -c 'import random, socket
taken = []
for port in random.sample(range(20000, 32000), 1000):
    try:
        taken.append(socket.create_server(("127.0.0.1", port)))
    except OSError:
        continue
    if len(taken) == 4:
        break
port, *others = [item.getsockname()[1] for item in taken]
print("--dashboard-port", port, "--port", others[0], "--ray-client-server-port", others[1], "--dashboard-agent-listen-port", others[2])')
    port="${ports[1]:?no free port}"
  fi
  ray_token
  "${RAY}" start --head --node-ip-address 127.0.0.1 --dashboard-host 127.0.0.1 --num-gpus "$1" --disable-usage-stats --temp-dir "${folder}/ray" "${ports[@]}"
  if ! trusted "${port}"; then
    printf 'Ray was started, but its job server does not listen at 127.0.0.1:%s (there: %s). Fix: see %s.\n' \
      "${port}" "$(listeners "${port}" | tr '\n' ' ')" "${folder}/ray/session_latest/logs/dashboard.log" >&2
    exit 1
  fi
  printf '%s\n' "${port}" > "${folder}/job_port"
  RAY_JOB_ADDRESS="http://127.0.0.1:${port}"
  printf 'Ray stays up for the next run; "%s stop" ends it.\n' "${RAY}"
}

# submit TRAIN_FLAGS...: run train.py as a Ray job and wait for it. Jobs have no working directory of ours, hence the absolute paths.
submit() {
  if [[ -n "${PLAN_ONLY}" ]]; then exec "${PYTHON}" "${ROOT}/train.py" "$@"; fi
  local name variables='"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"'
  # A job does not see this shell's environment; train.py gives these to trainer and engines alike.
  for name in NCCL_CUMEM_ENABLE NCCL_NVLS_ENABLE; do
    if [[ -n "${!name:-}" ]]; then variables+=", \"${name}\": \"${!name}\""; fi
  done
  "${RAY}" job submit --address="${RAY_JOB_ADDRESS}" --runtime-env-json="{\"env_vars\": {${variables}}}" \
    -- "${PYTHON}" "${ROOT}/train.py" "$@"
}
