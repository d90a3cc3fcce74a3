# Qwen2.5-3B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 36
  --hidden-size 2048
  --ffn-hidden-size 11008
  --num-attention-heads 16
  --group-query-attention
  --num-query-groups 2
  --vocab-size 151936
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 1000000
)
