"""Optimizer-state offload for Megatron-LM and PyTorch: fp32 masters and Adam moments in host memory and on storage paths."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["OffloadConfig", "OffloadedAdamW", "PathConfig"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that planning tools work where torch is not installed.
    if name == "OffloadedAdamW":
        from .optimizer import OffloadedAdamW

        return OffloadedAdamW
    if name in ("OffloadConfig", "PathConfig"):
        from . import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
