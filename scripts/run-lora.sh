#!/usr/bin/env bash
# Adapters (LoRA) over a frozen base: run-colocate.sh with --lora-rank and what goes with it. The same variables; flags are passed on.
# As it stands it trains the tiny model's adapters on a CPU host; set the variables for your own:
#   MODEL=qwen3-8B HF_CHECKPOINT=… PROMPT_DATA=train.jsonl RANK=32 LR=1e-5 bash scripts/run-lora.sh --save checkpoints --save-interval 20
# What would run where, without starting anything:
#   MODEL=qwen3-8B ACTOR_GPUS=8 TP=2 RANK=32 bash scripts/run-lora.sh --plan
set -euo pipefail
RANK="${RANK:-8}"
ALPHA="${ALPHA:-$((2 * RANK))}"
TARGETS="${TARGETS:-all-linear}"     # or ends of HF modules' names: "q_proj v_proj"
LR="${LR:-1e-4}"              # adapters want about ten times the rate of whole weights
read -r -a targets <<< "${TARGETS}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/run-colocate.sh" \
  --lora-rank "${RANK}" --lora-alpha "${ALPHA}" --lora-target-modules "${targets[@]}" --lr "${LR}" "$@"
