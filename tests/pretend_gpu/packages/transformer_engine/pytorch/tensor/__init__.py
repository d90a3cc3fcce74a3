"""Quantised tensors, of which there are none."""


class QuantizedTensor:
    """Megatron asks whether a weight is one."""
