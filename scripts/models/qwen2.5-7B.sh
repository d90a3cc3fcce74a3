# Qwen2.5-7B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 28
  --hidden-size 3584
  --ffn-hidden-size 18944
  --num-attention-heads 28
  --group-query-attention
  --num-query-groups 4
  --vocab-size 152064
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 1000000
  --untie-embeddings-and-output-weights
)
