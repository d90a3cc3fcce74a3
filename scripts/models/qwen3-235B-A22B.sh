# Qwen3-235B-A22B: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 94
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 4
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
  --num-experts 128
  --moe-layer-freq "[1]*94"
  --moe-ffn-hidden-size 1536
  --moe-router-topk 8
  --moe-router-score-function softmax
  --moe-router-load-balancing-type none
  --moe-aux-loss-coeff 0
  --moe-router-dtype fp32
  --moe-token-dispatcher-type alltoall
  --moe-grouped-gemm
  --moe-permute-fusion
)
