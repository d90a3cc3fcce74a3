"""Runs inside the engine: `--custom-weight-loader slime_like.weight_sync.in_engine.shm_loader.load` takes streams of
weights, and tells digests of the weights that the engine holds (receipt.py).

A request carries only what to do, as a uint8 tensor. Imports nothing heavy at the start.
"""

from __future__ import annotations

import logging
import os

from slime_like.weight_sync.in_engine import intake
from slime_like.weight_sync.in_engine import receipt as engine_receipt
from slime_like.weight_sync.in_engine.shm_slots import DIRECTORY_VARIABLE

logger = logging.getLogger(__name__)


def load(model, named_tensors) -> None:
    """SGLang's interface of a custom loader: [(intake.INTAKE_NAME or engine_receipt.RECEIPT_NAME, JSON as
    uint8)].
    """
    ((name, data),) = named_tensors
    request = bytes(data.cpu().numpy())
    if name == intake.INTAKE_NAME:
        intake.take(model, request, os.environ.get(DIRECTORY_VARIABLE))
    elif name == engine_receipt.RECEIPT_NAME:
        engine_receipt.take(model, request)
    else:
        # An exception would end SGLang's scheduler (0.5.23); the trainer notices that nothing was done.
        logger.error(
            "this engine's slime_like does not know the trainer's request %s: have both the same version?", name
        )
