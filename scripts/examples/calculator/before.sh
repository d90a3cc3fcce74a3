# Sourced by scripts/run_example.sh: rows, and a tiny model that has seen the tool being used, among other things.
[[ -f runs/tiny/calculator-data/train.jsonl ]] || "${PYTHON}" scripts/examples/calculator/make_data.py runs/tiny/calculator-data
[[ -f runs/tiny/tiny-qwen3/model.safetensors ]] || "${PYTHON}" scripts/make_tiny_model.py runs/tiny/tiny-qwen3
if [[ ! -f runs/tiny/calculator-model/model.safetensors.index.json ]]; then
  "${PYTHON}" train.py --loss-type sft_loss --hf-checkpoint runs/tiny/tiny-qwen3 --prompt-data runs/tiny/calculator-data/sft.jsonl \
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --num-rollout "${WARM_UP_STEPS:-120}" --rollout-batch-size 64 \
    --actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 2e-3 --lr-warmup-iters 10 --adam-beta2 0.98 \
    --save runs/tiny/calculator-warm-up/checkpoints --no-save-optim --save-hf runs/tiny/calculator-model --run-dir runs/tiny/calculator-warm-up
fi
