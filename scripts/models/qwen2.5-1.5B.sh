# Qwen2.5-1.5B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 28
  --hidden-size 1536
  --ffn-hidden-size 8960
  --num-attention-heads 12
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
