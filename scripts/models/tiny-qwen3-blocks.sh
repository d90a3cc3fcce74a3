# models/tiny-qwen3-blocks: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 4
  --hidden-size 128
  --ffn-hidden-size 384
  --num-attention-heads 4
  --group-query-attention
  --num-query-groups 2
  --kv-channels 64
  --vocab-size 320
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --disable-bias-linear
  --qk-layernorm
  --position-embedding-type rope
  --rotary-base 10000
)
