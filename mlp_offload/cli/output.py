"""What all commands print alike: one JSON object with ``--json``, and one line for what went wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(items: "Mapping[str, Any]") -> None:
    """One JSON object on standard output, with ``ok`` first."""
    print(json.dumps({"ok": True} | dict(items)))


def tell_failure(options: argparse.Namespace, error: Exception) -> None:
    """The error on standard error, or as JSON on standard output where that was asked for."""
    if getattr(options, "json", False):
        print(json.dumps({"ok": False, "error": str(error)}))
    else:
        print(f"mlp-offload {options.command}: {error}", file=sys.stderr)
