# Qwen3-32B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 64
  --hidden-size 5120
  --ffn-hidden-size 25600
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --vocab-size 151936
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --disable-bias-linear
  --qk-layernorm
  --position-embedding-type rope
  --rotary-base 1000000
  --untie-embeddings-and-output-weights
)
