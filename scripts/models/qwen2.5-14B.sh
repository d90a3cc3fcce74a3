# Qwen2.5-14B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
# The base model's epsilon; the Instruct model's config says 1e-6: set NORM_EPSILON=1e-6 for it.
MODEL_ARGS=(
  --num-layers 48
  --hidden-size 5120
  --ffn-hidden-size 13824
  --num-attention-heads 40
  --group-query-attention
  --num-query-groups 8
  --vocab-size 152064
  --normalization RMSNorm
  --norm-epsilon "${NORM_EPSILON:-1e-5}"
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 1000000
  --untie-embeddings-and-output-weights
)
