# GLM-4.5-Air (106B-A12B): source this file, then pass "${MODEL_ARGS[@]}" to train.py.
# The layer that predicts the token after the next is left out: it is not trained.
MODEL_ARGS=(
  --num-layers 46
  --hidden-size 4096
  --ffn-hidden-size 10944
  --num-attention-heads 96
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --vocab-size 151552
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 1000000
  --rotary-percent 0.5
  --untie-embeddings-and-output-weights
  --num-experts 128
  --moe-layer-freq "[0]*1+[1]*45"
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 1408
  --moe-router-topk 8
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-router-bias-update-rate 0
  --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 0
  --moe-router-dtype fp32
  --moe-token-dispatcher-type alltoall
  --moe-grouped-gemm
  --moe-permute-fusion
)
