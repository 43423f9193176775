"""What published Megatron-Core wheels lack, filled in at run time; call ``fill()`` before Megatron starts."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path


def fill() -> None:
    """Fill each gap that this Megatron-Core has; does nothing where there is none.

    * ``compile_helpers`` runs make in a directory whose Makefile is not in the wheel, and ends the process. The
      compiled module is in the wheel: then there is nothing to compile.
    * ``moe_utils`` of 0.16.1 uses ``te_general_gemm`` without defining it where Transformer Engine is absent.
    """
    dataset_utils = import_module("megatron.core.datasets.utils")
    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if compiled and not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = _nothing_to_compile
    moe_utils = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _nothing_to_compile() -> None:
    pass
