"""Every option of mlp_offload, declared once: a field of ``OffloadConfig`` or ``PathConfig``.

Command-line flags (``flags``), TOML keys, the README's table and the echo at start-up are all made from these fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .units import format_bytes, format_rate, parse_bytes

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

MODES = ("none", "mlp")
ENGINES = ("auto", "io_uring", "threads")
VARIANTS = ("auto", "avx512", "avx2", "scalar")
UPDATE_DEVICES = ("auto", "cpu", "cuda")
AUTO = "auto"


def _option(default: Any, help: str, *, kind: str, choices: Sequence[str] = (), least: "float | None" = None) -> Any:
    """A dataclass field that carries how it is read (``kind``), its limits and its help text."""
    return field(default=default, metadata={"help": help, "kind": kind, "choices": tuple(choices), "least": least})


@dataclass(frozen=True)
class PathConfig:
    """One directory on one device or file system, as ``DIR[,key=value]...``.

    Attributes:
        directory: where the job directory is made; environment variables are expanded on each rank.
        read, write: sustained bandwidth, bytes/s; None = not known, then it is measured at start-up (option ``probe``).
        capacity: bytes that the ranks of this node may use there together; None = what is free.
        engine: overrides ``OffloadConfig.engine`` for this path; "auto" keeps it.
    """

    directory: str
    read: "int | None" = None
    write: "int | None" = None
    capacity: "int | None" = None
    engine: str = AUTO

    @property
    def bytes_per_second(self) -> "int | None":
        """The slower direction; None when neither is known."""
        known = [rate for rate in (self.read, self.write) if rate is not None]
        return min(known) if known else None

    @classmethod
    def parse(cls, spec: "str | Mapping[str, Any]") -> "PathConfig":
        """From ``"/nvme/scratch,read=5GB/s,capacity=1TiB"`` or the same keys as a TOML table.

        Raises:
            ConfigError: unknown key, bad unit, no directory; names the spec and lists the keys.
        """
        if isinstance(spec, str):
            directory, *pairs = spec.split(",")
            items: "dict[str, Any]" = {"directory": directory.strip()}
            for pair in pairs:
                key, separator, value = pair.partition("=")
                if not separator:
                    raise ConfigError(f"path {spec!r}: {pair!r} is not key=value; keys: {_keys(cls, 'directory')}")
                if key.strip() in items:
                    raise ConfigError(f"path {spec!r}: {key.strip()!r} is given twice")
                items[key.strip()] = value.strip()
        else:
            items = dict(spec)
        _refuse_unknown(items, cls, f"path {spec!r}")
        if not isinstance(items.get("directory"), str) or not items["directory"]:
            raise ConfigError(f"path {spec!r}: no directory; write DIR[,read=BYTES/s][,write=BYTES/s][,capacity=BYTES]")
        for key in ("read", "write", "capacity"):
            if items.get(key) is not None:
                items[key] = parse_bytes(items[key], f"path {items['directory']!r}: {key}")
                if items[key] == 0:
                    raise ConfigError(f"path {items['directory']!r}: {key} must be above 0")
        if items.get("engine", AUTO) not in ENGINES:
            raise ConfigError(
                f"path {items['directory']!r}: engine {items['engine']!r} is not one of {', '.join(ENGINES)}"
            )
        return cls(**items)

    def resolved_directory(self) -> str:
        """The directory with ``~`` and environment variables expanded, on this rank.

        Raises:
            ConfigError: a variable is not set here; names it.
        """
        expanded = os.path.expandvars(os.path.expanduser(self.directory))
        missing = re.search(r"\$(\w+|\{[^}]*\})", expanded)
        if missing:
            raise ConfigError(
                f"path {self.directory!r}: environment variable {missing.group(0)} is not set on this rank"
            )
        return expanded

    def __str__(self) -> str:
        extras = [f"{k}={format_rate(v)}" for k, v in (("read", self.read), ("write", self.write)) if v is not None]
        extras += [f"capacity={format_bytes(self.capacity)}"] if self.capacity is not None else []
        extras += [f"engine={self.engine}"] if self.engine != AUTO else []
        return ",".join([self.directory, *extras])


@dataclass(frozen=True)
class OffloadConfig:
    """All options. Everything is checked on construction; sizes are per rank.

    Raises:
        ConfigError: on construction, with the option's name and what to write instead.
    """

    paths: "tuple[PathConfig, ...]" = _option(
        (), "directory that holds a share of the state; repeat for several, each on its own device", kind="path"
    )
    host_memory: "int | str" = _option(
        AUTO,
        "host memory for state buffers, per rank; auto = host_memory_fraction of what is free, by rank",
        kind="bytes_or_auto",
    )
    host_memory_fraction: float = _option(
        0.5,
        "with host_memory=auto: share of min(available memory, cgroup limit), divided among a node's ranks",
        kind="float",
        least=0.0,
    )
    subgroup_size: int = _option(
        2**25,
        "elements of a subgroup, the unit that is fetched, updated and flushed (10 or 12 bytes each)",
        kind="int",
        least=1,
    )
    staging_count: int = _option(
        0,
        "buffers in motion (fetching, updating, flushing), at least 3; the rest of host_memory holds resident subgroups; 0 = 2 + 2 a path",
        kind="int",
        least=0,
    )
    engine: str = _option(
        AUTO, "storage engine; auto = io_uring where the kernel allows it, else threads", kind="choice", choices=ENGINES
    )
    direct: bool = _option(
        True, "O_DIRECT, past the page cache; falls back with a warning where it is refused", kind="bool"
    )
    threads: int = _option(4, "I/O threads a path (threads engine)", kind="int", least=1)
    iodepth: int = _option(8, "blocks in flight a path (io_uring engine)", kind="int", least=1)
    block_size: int = _option(2**21, "bytes of one I/O request to the kernel", kind="bytes", least=4096)
    probe: bool = _option(
        True,
        "with several paths, measure those without read= and write= at start-up (about a second, kept a week)",
        kind="bool",
    )
    checksums: bool = _option(True, "write a crc32c with every subgroup and check it on fetch", kind="bool")
    warn_seconds: float = _option(
        30.0, "warn when a storage call has not returned after this time", kind="float", least=0.0
    )
    timeout_seconds: float = _option(
        600.0, "stop the run when a storage call has not returned after this time", kind="float", least=0.0
    )
    master_weights: str = _option(
        "remainder",
        "what is kept of a bf16 weight's fp32 master: remainder = the 16 bits that the weight lacks (10 bytes a parameter "
        "instead of 12, the same numbers; nobody but the optimizer may change the weights); full = all 32",
        kind="choice",
        choices=("remainder", "full"),
    )
    gpu_memory: int = _option(
        0,
        "spare GPU memory for state, per rank: subgroups that stay there and are updated there, and with room for four two "
        "buffers that others pass through",
        kind="bytes",
    )
    update_device: str = _option(
        AUTO,
        "where subgroups are updated, with the same bits: cpu; cuda = all on the GPU (with gpu_memory 0 two buffers are taken "
        "there); auto = in gpu_memory, and as many others as measured rates give the GPU",
        kind="choice",
        choices=UPDATE_DEVICES,
    )
    update_threads: int = _option(
        0, "threads of the Adam kernel; 0 = cores of the node / its ranks", kind="int", least=0
    )
    adam_variant: str = _option(
        AUTO, "SIMD variant of the Adam kernel; all give the same bits", kind="choice", choices=VARIANTS
    )
    snapshots: bool = _option(
        False,
        "reserve room on the paths at start-up for checkpoints in the background, which keep the state a second time while "
        "training goes on; Megatron's --async-save sets it",
        kind="bool",
    )
    job: str = _option(AUTO, "name of the job directory; auto = the scheduler's job id, else user and host", kind="str")
    telemetry: str = _option("", "directory for one JSON line a step and rank; empty = none", kind="str")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _convert(f, getattr(self, f.name)))
        if self.block_size % 4096:
            raise ConfigError(f"block_size {self.block_size}: must be a multiple of 4096 bytes")
        if 0 < self.staging_count < 3:
            raise ConfigError(
                f"staging_count {self.staging_count}: must be at least 3 (one buffer fetching, one updating, one flushing), or 0"
            )
        if self.gpu_memory and self.update_device == "cpu":
            raise ConfigError(
                f"gpu_memory {format_bytes(self.gpu_memory)}: state that stays on the GPU is updated there, and update_device "
                "is cpu; set gpu_memory to 0 or update_device to auto"
            )
        if not 0 < self.host_memory_fraction <= 1:
            raise ConfigError(f"host_memory_fraction {self.host_memory_fraction}: must be above 0 and at most 1")
        if self.timeout_seconds <= self.warn_seconds:
            raise ConfigError(
                f"timeout_seconds {self.timeout_seconds:g}: must be above warn_seconds {self.warn_seconds:g}, so that a warning comes first"
            )

    def replace(self, **changes: Any) -> "OffloadConfig":
        """A copy with some options changed, checked again."""
        _refuse_unknown(changes, OffloadConfig, "options")
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_mapping(cls, items: Mapping[str, Any], where: str = "options") -> "OffloadConfig":
        """From TOML-like keys, which stand in ``where``.

        Raises:
            ConfigError: an unknown key (lists the right ones) or a bad value.
        """
        _refuse_unknown(items, cls, where)
        try:
            return cls(**items)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def from_toml(cls, file: "str | os.PathLike[str]") -> "OffloadConfig":
        """From a TOML file with the field names as keys; paths are strings or ``[[paths]]`` tables."""
        return cls.from_mapping(read_toml(file), str(file))

    def echo(self) -> str:
        """One line a set option, as it is used: for the log at start-up."""
        lines = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "paths":
                lines += [f"  path                  {p}" for p in value]
            else:
                shown = format_bytes(value) if f.metadata["kind"].startswith("bytes") and value != AUTO else value
                lines.append(f"  {f.name:<21} {'none' if shown == '' else shown}")
        return "\n".join(lines)


def read_toml(file: "str | os.PathLike[str]") -> "dict[str, Any]":
    """The keys of a TOML file. Raises ConfigError when it cannot be read, naming it and the line."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(file)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(file)!r} is not TOML: {error}") from error


# ------------------------------------------------------------------------------------------ helpers


def _keys(cls: type, *without: str) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls) if f.name not in without)


def _refuse_unknown(items: Iterable[str], cls: type, where: str) -> None:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in items:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"{where}: unknown key {key!r}{hint} Known keys: {', '.join(names)}")


def _convert(f: "dataclasses.Field[Any]", value: Any) -> Any:
    """``value`` in the field's type, or ConfigError with the option's name."""
    kind, name = f.metadata["kind"], f.name
    if kind == "path":
        if isinstance(value, (str, Mapping, PathConfig)):
            value = [value]
        return tuple(p if isinstance(p, PathConfig) else PathConfig.parse(p) for p in value)
    if kind == "bytes_or_auto" and value == AUTO:
        return value
    if kind.startswith("bytes"):
        value = parse_bytes(value, name)
    elif kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{name} {value!r}: must be true or false")
    elif kind in ("int", "float"):
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError):
            number = float("nan")
        if number != number or (kind == "int" and not number.is_integer()):
            raise ConfigError(f"{name} {value!r}: must be {'a whole number' if kind == 'int' else 'a number'}")
        value = int(number) if kind == "int" else number
    elif kind == "choice" and value not in f.metadata["choices"]:
        raise ConfigError(f"{name} {value!r}: must be one of {', '.join(f.metadata['choices'])}")
    elif kind == "str" and not isinstance(value, str):
        raise ConfigError(f"{name} {value!r}: must be text")
    least = f.metadata["least"]
    if least is not None and value < least:
        raise ConfigError(f"{name} {value}: must be at least {least:g}")
    return value
