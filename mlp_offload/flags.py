"""The options on a command line and in the README, made from the fields of ``config.OffloadConfig``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from .config import MODES, OffloadConfig, read_toml
from .errors import ConfigError
from .units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--optimizer-offload``, ``--mlp-offload-config`` and one ``--mlp-offload-*`` flag an option.

    The parser takes any text for them, and ``from_arguments`` checks it: the parser would print all flags of the
    script before its message, on every rank.
    """
    group = parser.add_argument_group(
        "optimizer offload",
        "Keep fp32 master weights and Adam moments in host memory and on storage paths. Example: "
        "--optimizer-offload mlp --mlp-offload-path '$SLURM_TMPDIR,read=6GB/s' --mlp-offload-path /lustre/me/scratch",
    )
    group.add_argument(
        "--optimizer-offload",
        metavar=_choice_of(MODES),
        default="none",
        help="where optimizer state lives: none = as stock Megatron",
    )
    group.add_argument(
        "--mlp-offload-config",
        metavar="FILE.toml",
        default=None,
        help="TOML file with any of the options below; flags win over it",
    )
    for f in dataclasses.fields(OffloadConfig):
        meta = f.metadata
        settings: "dict[str, Any]" = {
            "dest": argument_name(f.name),
            "default": None,
            "help": f"{meta['help']} (default: {_shown(f)})",
        }
        if meta["kind"] == "path":
            settings |= {
                "action": "append",
                "metavar": "DIR[,read=BYTES/s][,write=BYTES/s][,capacity=BYTES][,engine=ENGINE]",
            }
        elif meta["kind"] == "choice":
            settings |= {"metavar": _choice_of(meta["choices"])}
        elif meta["kind"] == "bool":
            settings |= {"action": argparse.BooleanOptionalAction}
        else:
            settings |= {
                "metavar": {"bytes": "BYTES", "bytes_or_auto": "BYTES|auto", "str": "TEXT"}.get(meta["kind"], "N")
            }
        settings["help"] = settings["help"].replace("%", "%%")
        group.add_argument(flag_name(f.name), **settings)
    return parser


def from_arguments(args: Any) -> OffloadConfig:
    """The options from parsed arguments (see ``add_arguments``): the TOML file first, flags over it."""
    file = getattr(args, "mlp_offload_config", None)
    items: "dict[str, Any]" = {}
    if file:
        items = read_toml(file)
        OffloadConfig.from_mapping(items, f"config file {file!r}")
    for f in dataclasses.fields(OffloadConfig):
        value = getattr(args, argument_name(f.name), None)
        if value is not None:
            items[f.name] = value
    config = OffloadConfig(**items)
    if not config.paths:
        raise ConfigError(
            "--optimizer-offload mlp needs at least one --mlp-offload-path DIR (or paths in --mlp-offload-config)"
        )
    return config


def flag_name(field_name: str) -> str:
    """``--mlp-offload-host-memory`` from ``host_memory``; ``paths`` is repeatable and singular."""
    return "--mlp-offload-" + ("path" if field_name == "paths" else field_name.replace("_", "-"))


def argument_name(field_name: str) -> str:
    """The attribute of the parsed arguments that holds an option."""
    return flag_name(field_name)[2:].replace("-", "_")


def options_table() -> str:
    """The README's table of options, in Markdown."""
    rows = ["| flag | TOML key | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{flag_name(f.name)}` | `{f.name}` | {_shown(f)} | {f.metadata['help']} |"
        for f in dataclasses.fields(OffloadConfig)
    ]
    return "\n".join(rows)


def _choice_of(choices: Sequence[str]) -> str:
    return "{" + ",".join(choices) + "}"


def _shown(f: "dataclasses.Field[Any]") -> str:
    if f.metadata["kind"] == "path":
        return "none"
    if f.metadata["kind"] == "bytes":
        return format_bytes(f.default)
    return str(f.default).lower() if isinstance(f.default, bool) else str(f.default) or "none"
