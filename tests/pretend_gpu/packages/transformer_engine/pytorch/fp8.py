"""fp8 is off."""


class FP8GlobalStateManager:
    """What is so in this process."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Never."""
        return False


def fp8_autocast(*_, **__):
    """Megatron asks for it where a layer has a recipe of its own."""
    raise NotImplementedError("fp8 is not pretended")
