"""Fusible operations: names that Megatron's annotations have; it uses them with --use-transformer-engine-op-fuser."""


class FusibleOperation:
    """One of them."""


class Sequential:
    """Several of them."""

    def __init__(self, *_):
        raise NotImplementedError("fused operations are not pretended")
