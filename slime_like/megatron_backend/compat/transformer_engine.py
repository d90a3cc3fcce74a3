"""Whether transformer-engine can be used in this process: found out once, by importing it.

A package that is there and cannot be imported (compiled against another torch, CUDA library missing) fails with any
exception; Megatron (0.16.1) expects an ImportError only, and would take this process with it. So it is hidden then.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys

import torch

from slime_like.errors import ConfigError

logger = logging.getLogger(__name__)

_PACKAGE = "transformer_engine"
#: What --attention-backend asks of transformer-engine by name.
_ITS_BACKENDS = ("flash", "fused", "unfused")


@functools.cache
def why_not() -> str | None:
    """None where transformer-engine's GPU layers can be used in this process, else the reason.

    The first call must precede the first import of Megatron: it decides what Megatron sees.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return "it is not installed"
    if not torch.cuda.is_available():
        reason = "there is no CUDA device"
    else:
        try:
            importlib.import_module(f"{_PACKAGE}.pytorch")
        except Exception as error:  # noqa: BLE001 - a broken build fails in any way; the reason is kept, not swallowed
            reason = f"it is installed, but cannot be imported: {type(error).__name__}: {error}"
        else:
            return None
    _hide()
    return reason


def uses_transformer_engine(attention_backend: str) -> bool:
    """Whether the model is made of transformer-engine's layers: where they work, unless --attention-backend local.

    Raises ConfigError where a GPU host cannot do what the flag asks for by name. A CPU host has notes for that
    (config/slime_flags/notices.py).
    """
    reason = why_not()
    if attention_backend == "local" or reason is None:
        return attention_backend != "local"
    if torch.cuda.is_available():
        if attention_backend in _ITS_BACKENDS:
            problem = (
                f"--attention-backend {attention_backend} asks for transformer-engine, but {reason}.\n  Fix:"
                " --attention-backend auto (torch's own attention where transformer-engine does not work), or a"
                " transformer-engine that is built for this torch (docs/install.md)."
            )
            raise ConfigError([problem])
        _note(reason)
    return False


@functools.cache
def _note(reason: str) -> None:
    """Say once in a process that the slower layers are used."""
    logger.warning("transformer-engine is not used: %s. The trainer's layers are torch's own, which is slower.", reason)


def _hide() -> None:
    """Let every later `import transformer_engine` raise ImportError, whatever a broken one has left behind."""
    for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(_PACKAGE + ".")]:
        del sys.modules[name]
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # Python's own way to say that there is none
