"""A pretended transformer-engine: what Megatron's extension (megatron-core 0.16.1) imports and calls of version 2.10,
on plain torch, so that Megatron's own classes for transformer-engine and its own layer specification run on any device.

The interface (names, arguments, attributes, marks on parameters, what passes between ranks and what is returned) is
the real one's; the arithmetic is torch's. Not there: fp8 and fp4, user buffers, CUDA graphs, activation offloading,
fused permutation, fused rope and fused Adam (Megatron then takes what it takes without them), and attention over
context parallel ranks. It must not be on the path of a process that is to have the real one.
"""

from transformer_engine import common, pytorch

__version__ = "2.10.0"
__all__ = ["common", "pytorch"]
