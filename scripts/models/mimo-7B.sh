# MiMo-7B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
# The layer that predicts the token after the next is left out: it is not trained.
MODEL_ARGS=(
  --num-layers 36
  --hidden-size 4096
  --ffn-hidden-size 11008
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --vocab-size 151680
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 640000
  --untie-embeddings-and-output-weights
)
