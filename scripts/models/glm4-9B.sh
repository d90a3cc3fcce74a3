# GLM-4-9B-0414: source this file, then pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
  --num-layers 40
  --hidden-size 4096
  --ffn-hidden-size 13696
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 2
  --kv-channels 128
  --vocab-size 151552
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --add-qkv-bias
  --position-embedding-type rope
  --rotary-base 10000
  --rotary-percent 0.5
  --rotary-interleaved
  --post-self-attn-layernorm
  --post-mlp-layernorm
  --untie-embeddings-and-output-weights
)
