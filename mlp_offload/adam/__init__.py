"""AdamW on the host: a native kernel, and a readable reference with the same bits."""

from .kernel import (
    DTYPE_CODES,
    AdamKernel,
    AdamScalars,
    Segment,
    adam_scalars,
    check_adam_options,
    default_threads,
)
from .reference import adamw_step

__all__ = [
    "DTYPE_CODES",
    "AdamKernel",
    "AdamScalars",
    "Segment",
    "adam_scalars",
    "adamw_step",
    "check_adam_options",
    "default_threads",
]
