# SmolLM2 135M: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 30
  --hidden-size 576
  --ffn-hidden-size 1536
  --num-attention-heads 9
  --group-query-attention
  --num-query-groups 3
  --kv-channels 64
  --vocab-size 49152
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --position-embedding-type rope
  --rotary-base 100000
)
