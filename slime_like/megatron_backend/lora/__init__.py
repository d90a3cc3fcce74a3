"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's linear layers, equal to PEFT's on the HF model."""
