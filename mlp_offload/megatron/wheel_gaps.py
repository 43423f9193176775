"""What published Megatron-Core wheels lack, filled in at run time; call ``fill()`` before Megatron starts."""

from __future__ import annotations

import argparse
import importlib.util
import re
from importlib import import_module
from pathlib import Path

_BARE_PERCENT = re.compile(r"%(?!%|\(\w+\)[a-z])")


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


def escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Let ``--help`` be printed: argparse formats help texts, and some of 0.18 and 0.19 have a bare percent sign."""
    for action in parser._actions:  # no public way to list them
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                parser._get_formatter()._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = _BARE_PERCENT.sub("%%", action.help)


def _nothing_to_compile() -> None:
    pass
