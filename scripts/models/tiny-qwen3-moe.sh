# models/tiny-qwen3-moe: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 4
  --hidden-size 128
  --ffn-hidden-size 384
  --num-attention-heads 4
  --group-query-attention
  --num-query-groups 2
  --kv-channels 32
  --vocab-size 320
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --disable-bias-linear
  --qk-layernorm
  --position-embedding-type rope
  --rotary-base 10000
  --untie-embeddings-and-output-weights
  --num-experts 8
  --moe-layer-freq "[1]*4"
  --moe-ffn-hidden-size 128
  --moe-router-topk 2
  --moe-router-score-function softmax
  --moe-router-load-balancing-type none
  --moe-aux-loss-coeff 0
  --moe-router-dtype fp32
  --moe-token-dispatcher-type alltoall
)
