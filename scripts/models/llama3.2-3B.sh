# Llama 3.2 3B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 28
  --hidden-size 3072
  --ffn-hidden-size 8192
  --num-attention-heads 24
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --vocab-size 128256
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --position-embedding-type rope
  --rotary-base 500000
  --use-rope-scaling
  --rope-scaling-factor 32
)
