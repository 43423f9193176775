"""Bytes, rates and counts between people and numbers. Binary suffixes (GiB) and decimal ones (GB) differ."""

from __future__ import annotations

import math
import re
from typing import Any

from .errors import ConfigError

_FACTORS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FACTORS |= {p + "iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
_FACTORS |= {p + "B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}
_LOWER = {k.lower(): v for k, v in _FACTORS.items()}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*(?:/s)?\s*")


def parse_bytes(text: "str | int | float", what: str = "size") -> int:
    """Bytes from "64GiB" (2**30), "5.6GB/s" (10**9), "1e9" or a number. K, M, G, T alone are binary.

    Raises:
        ConfigError: not a number with a known suffix, or negative; lists the suffixes.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value, factor = float(text), 1
    else:
        match = _PATTERN.fullmatch(str(text))
        if match is None or match.group(2).lower() not in _LOWER:
            known = ", ".join(k for k in _FACTORS if k)
            raise ConfigError(
                f"{what}: cannot read {text!r} as bytes; write a number with one of {known} (as in 64GiB)"
            )
        value, factor = float(match.group(1)), _LOWER[match.group(2).lower()]
    if value < 0 or value != value or value == float("inf"):
        raise ConfigError(f"{what}: {text!r} is not a size")
    return round(value * factor)


def format_bytes(nbytes: float) -> str:
    """ "1.5 GiB" from 1610612736."""
    size = float(nbytes)
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or suffix == "TiB":
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    raise AssertionError("unreachable")


def round_up_bytes(nbytes: int) -> str:
    """ "37MiB" from 37 MiB - 5 B: as an option is written, and never too little."""
    for factor, suffix in ((2**10, "KiB"), (2**20, "MiB")):
        if nbytes <= 10240 * factor:
            return f"{-(-nbytes // factor)}{suffix}"
    return f"{-(-nbytes // 2**30)}GiB"


def format_rate(bytes_per_second: float) -> str:
    """ "1.20 GB/s" from 1.2e9; decimal, as drives are sold."""
    for factor, suffix in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.2f} {suffix}"
    return f"{bytes_per_second:.0f} B/s"


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity and no NaN: these are None, in dictionaries and lists as well."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_seconds(seconds: float) -> str:
    """ "3.26 s", "838 s", "2.5 h", "12.1 days" or "33.0 years"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 6000:
        return f"{seconds:.0f} s"
    hours, days = seconds / 3600, seconds / 86400
    if hours < 48:
        return f"{hours:.1f} h"
    return f"{days:.1f} days" if days < 730 else f"{days / 365:.1f} years"
