"""``mlp-offload probe PATH...``: what each path gives, alone and with the others, to one process and to several."""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..config import AUTO, ENGINES, OffloadConfig, PathConfig
from ..errors import CapacityError, ConfigError, OffloadError
from ..units import format_bytes, format_rate, parse_bytes
from . import output

if TYPE_CHECKING:
    from ..storage.facts import PathFacts
    from ..storage.probe_processes import ProbeProcesses

_DESCRIPTION = """\
Measure what each path gives with the engine and the settings of a run: reading, writing and both at
once, and the latency of a single block; each path alone, then all at once; with one process, then
with several, as a node has ranks. Ends with flags to copy.

A run reads and writes at the same time, so the flags have the rates of "both at once", of all paths
together and all processes. The same rates of one process are kept for a week, by device and engine
settings: a run without read= and write= then finds them instead of measuring at start-up. Each
probe measures anew. Nothing is left on the paths, however it ends.
"""

_EXAMPLES = """\
examples:
  the drive of this node and the parallel file system:
    mlp-offload probe /nvme/scratch /lustre/me/scratch

  in the job itself, as many processes as it has ranks on a node, three block sizes:
    srun --ntasks=1 mlp-offload probe --processes 8 --block-size 1MiB --block-size 2MiB \\
        --block-size 8MiB "$SLURM_TMPDIR" /lustre/me/scratch

  a first look, for a script, without touching what runs go by:
    mlp-offload probe --seconds 0.3 --size 256MiB --no-cache --json /nvme/scratch
"""

_LEAST_SECONDS = 0.1
_FILL_WEIGHT = 2.0  # seconds that filling a path is thought to take, for the progress bar


@dataclass(frozen=True)
class Case:
    """Paths (by index) that are measured together, by how many processes, with which block size (by index)."""

    process_count: int
    paths: "tuple[int, ...]"
    block: int


@dataclass(frozen=True)
class Row:
    """One path in one case: rates in bytes/s of all processes together, latencies of single blocks in seconds.

    Attributes:
        at_once: paths that were measured together.
        mixed_read, mixed_write: while both directions are busy.
    """

    directory: str
    process_count: int
    at_once: int
    block_size: int
    read: float
    write: float
    mixed_read: float
    mixed_write: float
    read_latency_median: float
    read_latency_p99: float
    write_latency_median: float
    write_latency_p99: float


def add_command(commands: Any) -> None:
    """Add ``probe`` to the subcommands of ``mlp-offload``."""
    probe = commands.add_parser(
        "probe",
        help="measure bandwidth and latency of paths, and print the flags for them",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = OffloadConfig()
    probe.add_argument("paths", metavar="PATH", nargs="+", help="a directory, as in --mlp-offload-path")
    probe.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="measure with one process and with N (default: the GPUs of this node, at least 2)",
    )
    probe.add_argument("--seconds", type=float, default=1.0, help="of one measurement (default: 1)")
    probe.add_argument(
        "--size", metavar="BYTES", default="1GiB", help="scratch space on each path, all processes (default: 1GiB)"
    )
    probe.add_argument("--engine", choices=ENGINES, default=AUTO, help="as of the run (default: auto)")
    probe.add_argument(
        "--block-size",
        metavar="BYTES",
        action="append",
        help=f"as of the run; repeat to compare (default: {format_bytes(defaults.block_size)}); flags are for the first",
    )
    for name in ("threads", "iodepth"):
        default = getattr(defaults, name)
        probe.add_argument(
            f"--{name}", metavar="N", type=int, default=default, help=f"as of the run (default: {default})"
        )
    probe.add_argument("--no-direct", action="store_true", help="through the page cache")
    probe.add_argument("--no-cache", action="store_true", help="do not keep the rates for runs")
    output.add_json(probe)
    probe.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    try:
        return _probe(options)
    except KeyboardInterrupt:
        print("mlp-offload probe: interrupted; nothing is left on the paths", file=sys.stderr)
        return output.INTERRUPTED
    except OSError as error:
        raise OffloadError(str(error)) from error


def _probe(options: argparse.Namespace) -> int:
    from ..storage.facts import facts_of, shared_devices
    from ..storage.jobdir import check_directories
    from ..storage.probe_cache import measuring
    from ..storage.probe_processes import ProbeProcesses

    paths = [PathConfig.parse(path) for path in options.paths]
    configs = [_config(options, size) for size in options.block_size or [OffloadConfig().block_size]]
    blocks = [config.block_size for config in configs]
    process_count = max(2, gpu_count()) if options.processes is None else options.processes
    size_bytes = _check_numbers(options, process_count, blocks)
    directories = [str(d) for d in check_directories([path.resolved_directory() for path in paths])]
    facts = [facts_of(directory) for directory in directories]
    _check_room(paths, facts, size_bytes)
    settings = [[_settings(config, path) for config in configs] for path in paths]

    cases = plan(len(paths), process_count, len(blocks))
    begin, load = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as undo:
        for device in sorted({fact.device for fact in facts}):
            undo.enter_context(measuring(device))
        each_bytes = size_bytes // process_count
        processes = undo.enter_context(ProbeProcesses(process_count, directories, each_bytes, settings))
        rows, mixed = _measure(processes, cases, directories, blocks, options)
        engines, supports = processes.engines, processes.supports
    if not options.no_cache:
        _store(cases, mixed, facts, settings, options.seconds)
    last = {row.directory: row for row in rows if row.block_size == blocks[0]}  # the largest case of each comes last
    flags = [flag(path, last[directory]) for path, directory in zip(paths, directories)]
    told = []
    for fact, support, (kind, direct) in zip(facts, supports, engines):
        told.append(asdict(fact) | {"engine": kind, "direct": direct, "direct_supported": support.supported})
        told[-1] |= {"direct_reason": support.reason, "alignment": support.alignment}
    shared = shared_devices(facts)
    if options.json:
        items = {"paths": told, "measurements": [asdict(row) for row in rows], "flags": flags}
        items |= {"shared_devices": [{"device": device, "directories": on_it} for device, on_it in shared]}
        items |= {"kept": not options.no_cache, "seconds": time.monotonic() - begin, "load_before": load}
        output.print_json(items)
        return 0
    _show(told, rows, shared)
    together = f"{process_count} process{'es' if process_count > 1 else ''}"
    print(f"\nFor a run (both directions at once, all paths together, {together}):")
    print("\n".join(f"  {line}" for line in flags))
    if load > (os.cpu_count() or 1):
        print(
            "Other work took the cores when this began (see uptime): paths may look slower than they are: measure again without it."
        )
    if not options.no_cache:
        print(
            "A run without read= and write= finds what one process got, for a week, where its engine settings are these."
        )
    return 0


def plan(path_count: int, process_count: int, block_count: int) -> "list[Case]":
    """One process first; each path alone, then all."""
    groups = [(path,) for path in range(path_count)] + ([tuple(range(path_count))] if path_count > 1 else [])
    counts = sorted({1, process_count})
    return [Case(count, group, block) for count in counts for group in groups for block in range(block_count)]


def gpu_count() -> int:
    """GPUs that the NVIDIA driver offers here."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def flag(path: PathConfig, row: Row) -> str:
    """What to write on the command line of a run for a path, quoted for a shell."""
    read, write = (format_rate(rate).replace(" ", "") for rate in (row.mixed_read, row.mixed_write))
    engine = f",engine={path.engine}" if path.engine != AUTO else ""
    return f"--mlp-offload-path '{path.directory},read={read},write={write}{engine}'"


# ------------------------------------------------------------------------------------------ helpers


def _config(options: argparse.Namespace, block_size: "str | int") -> OffloadConfig:
    """The options that a run would have."""
    direct = not options.no_direct
    names = {name: getattr(options, name) for name in ("engine", "threads", "iodepth")}
    return OffloadConfig(block_size=block_size, direct=direct, **names)


def _settings(config: OffloadConfig, path: PathConfig) -> "dict[str, Any]":
    """Of the engine on one path; in the same form as ``rates`` asks the cache for it."""
    kind = config.engine if path.engine == AUTO else path.engine
    names = ("direct", "threads", "iodepth", "block_size")
    return {"kind": kind} | {name: getattr(config, name) for name in names}


def _check_numbers(options: argparse.Namespace, process_count: int, blocks: Sequence[int]) -> int:
    """``--size`` in bytes, when all numbers can be measured with."""
    if process_count < 1:
        raise ConfigError(f"--processes {process_count}: must be at least 1")
    if not _LEAST_SECONDS <= options.seconds < float("inf"):
        raise ConfigError(f"--seconds {options.seconds:g}: must be at least {_LEAST_SECONDS:g}")
    size_bytes = parse_bytes(options.size, "--size")
    least = 4 * max(*blocks, 2**20) * process_count
    if size_bytes < least:
        raise ConfigError(
            f"--size {options.size}: {process_count} processes with blocks of {format_bytes(max(blocks))} need at least "
            f"{format_bytes(least)} on each path"
        )
    return size_bytes


def _check_room(paths: Sequence[PathConfig], facts: "Sequence[PathFacts]", size_bytes: int) -> None:
    """Raises CapacityError where the scratch files do not fit."""
    for path, fact in zip(paths, facts):
        needed = size_bytes * sum(other.device == fact.device for other in facts)
        room = fact.free_bytes
        for quota in fact.quotas:
            if quota.limit_bytes is not None:
                room = min(room, quota.limit_bytes - quota.used_bytes)
        if path.capacity is not None:
            room = min(room, path.capacity)
        if needed > room:
            raise CapacityError(
                f"path '{path.directory}': measuring takes {format_bytes(needed)} on its device; {format_bytes(max(0, room))} "
                "may be used. Free space there, or give a smaller --size"
            )


def _measure(
    processes: "ProbeProcesses",
    cases: Sequence[Case],
    directories: Sequence[str],
    blocks: Sequence[int],
    options: argparse.Namespace,
) -> "tuple[list[Row], list[dict[int, Any]]]":
    """A row a case and path; and what "both at once" moved in each case, by path."""
    from ..storage.meter import RAMP

    seconds, rows, all_mixed = options.seconds, [], []
    span = (1 + RAMP) * seconds
    total = _FILL_WEIGHT * len(directories) + 4 * span * len(cases)  # three operations, and latencies
    with _progress(total, options.json) as advance:
        for path, directory in enumerate(directories):
            advance(0, f"filling {directory}")
            processes.fill(path)
            advance(_FILL_WEIGHT, "")
        for case in cases:
            where = directories[case.paths[0]] if len(case.paths) == 1 else f"all {len(case.paths)} paths at once"
            advance(0, f"{where}, {case.process_count} process{'es' if case.process_count > 1 else ''}")
            found: "dict[str, dict[int, Any]]" = {}
            for operation in ("read", "write", "mixed"):
                found[operation] = processes.measure(case.process_count, case.paths, case.block, operation, seconds)
                advance(span, "")
            latencies = {
                direction: processes.latencies(case.process_count, case.paths, case.block, direction, span / 2)
                for direction in ("read", "write")
            }
            advance(span, "")
            all_mixed.append(found["mixed"])
            for path in case.paths:
                row = {"directory": directories[path], "process_count": case.process_count}
                row |= {"at_once": len(case.paths), "block_size": blocks[case.block]}
                for direction in ("read", "write"):
                    row[direction] = found[direction][path][direction].bytes_per_second
                    row[f"mixed_{direction}"] = found["mixed"][path][direction].bytes_per_second
                    ordered = sorted(latencies[direction][path])
                    row[f"{direction}_latency_median"] = statistics.median(ordered)
                    row[f"{direction}_latency_p99"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
                rows.append(Row(**row))
    return rows, all_mixed


def _store(
    cases: Sequence[Case],
    mixed: "Sequence[dict[int, Any]]",
    facts: "Sequence[PathFacts]",
    settings: "Sequence[Sequence[dict[str, Any]]]",
    seconds: float,
) -> None:
    """Keep what start-up would measure: one process, all devices at once; paths on one device together make its rate."""
    from ..storage.probe import Bandwidth
    from ..storage.probe_cache import store

    for case, found in zip(cases, mixed):
        if case.process_count > 1 or len(case.paths) < len(facts):
            continue
        for device in {fact.device for fact in facts}:
            on_it = [path for path, fact in enumerate(facts) if fact.device == device]
            read, write = ([found[path][direction] for path in on_it] for direction in ("read", "write"))
            measured = Bandwidth(
                device=device,
                read_bytes_per_second=sum(moved.bytes_per_second for moved in read),
                write_bytes_per_second=sum(moved.bytes_per_second for moved in write),
                read_bytes=sum(moved.nbytes for moved in read),
                written_bytes=sum(moved.nbytes for moved in write),
                seconds=seconds,
                measured_at=time.time(),
            )
            store(measured, settings[on_it[0]][case.block])


@contextmanager
def _progress(total_seconds: float, quiet: bool) -> "Iterator[Callable[[float, str], None]]":
    """A bar with the time that is left, on standard error; called with seconds of work done, and what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not quiet:
        console.print(f"measuring for about {total_seconds:.0f} s")
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("of which left"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=quiet) as bar:
        task = bar.add_task("", total=total_seconds)

        def advance(seconds: float, description: str) -> None:
            bar.update(task, advance=seconds, **({"description": description} if description else {}))

        yield advance


def _show(told: "Sequence[dict[str, Any]]", rows: Sequence[Row], shared: "Sequence[tuple[str, list[str]]]") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..report.tables import keep_whole

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    for fact in told:
        lines = [f"{fact['kind']} on {fact['source']}{', in host memory' if fact['in_memory'] else ''}"]
        inodes = "" if fact["free_inodes"] is None else f", {fact['free_inodes']} inodes"
        lines.append(
            f"{format_bytes(fact['free_bytes'])} of {format_bytes(fact['total_bytes'])}{inodes} free; quota {fact['quota']}"
        )
        direct = f"O_DIRECT with {fact['alignment']} bytes alignment, {fact['direct_reason']}"
        through = "" if fact["direct"] else "; measured through the page cache"
        lines.append(
            f"engine {fact['engine']}; {direct if fact['direct_supported'] else fact['direct_reason']}{through}"
        )
        lines += [fact["striping"]] if fact["striping"] else []
        print("\n  ".join([shlex.quote(fact["directory"]), *lines]))
    table = Table("path", "processes", "paths\nat once", "block", title="MB/s, and ms of a single block: median (99 %)")
    for name in ("read", "write", "both at once\nread + write", "read\nlatency", "write\nlatency"):
        table.add_column(name, justify="right")
    for row in rows:
        mixed = f"{row.mixed_read / 1e6:.0f} + {row.mixed_write / 1e6:.0f}"
        latencies = (
            f"{1e3 * row.read_latency_median:.2f} ({1e3 * row.read_latency_p99:.2f})",
            f"{1e3 * row.write_latency_median:.2f} ({1e3 * row.write_latency_p99:.2f})",
        )
        cells = (row.directory, row.process_count, row.at_once, format_bytes(row.block_size))
        rates = (f"{row.read / 1e6:.0f}", f"{row.write / 1e6:.0f}", mixed)
        table.add_row(*map(str, cells), *rates, *latencies)
    console.print(keep_whole(table), crop=False)
    for device, on_it in shared:
        print(
            f"{' and '.join(map(shlex.quote, on_it))} lie on one device ({device}): together they give what one of them gives. "
            "Name one directory on each device"
        )
