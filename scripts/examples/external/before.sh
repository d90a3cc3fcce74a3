# Sourced by scripts/run_example.sh: starts the engine that this example uses and ends it afterwards, unless one answers at PORT already.
PORT="${PORT:-30000}"
FLAGS+=(--rollout-external-engine-addrs "127.0.0.1:${PORT}")
engine_answers() { (exec 3<>"/dev/tcp/127.0.0.1/${PORT}") 2>/dev/null; }
if ! engine_answers; then
  mkdir -p runs
  PORT="${PORT}" PYTHON="${PYTHON}" setpriv --pdeathsig KILL bash "${EXAMPLE}/engine.sh" >runs/external-engine.log 2>&1 &
  ENGINE=$!
  trap 'kill -KILL "${ENGINE}"' EXIT
  printf 'starting an engine at 127.0.0.1:%s (runs/external-engine.log)\n' "${PORT}"
  until engine_answers; do
    if ! kill -0 "${ENGINE}" 2>/dev/null || ((SECONDS > 180)); then
      tail -n 20 runs/external-engine.log >&2
      printf 'the engine did not start within %d s; its log is runs/external-engine.log\n' "${SECONDS}" >&2
      exit 1
    fi
    sleep 0.5
  done
fi
