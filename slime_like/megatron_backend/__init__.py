"""The trainer on Megatron-core: model, weights, packed batches, train step, checkpoints.

Importing this package makes megatron importable on hosts without CUDA; that must precede the first `import megatron`.
"""

from slime_like.megatron_backend.compat import megatron as compat

compat.install()
