"""``mlp-offload clean PATH...``: what dead jobs left on the paths, and its removal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from ..config import AUTO, PathConfig
from ..errors import ConfigError, OffloadError
from ..storage import leftovers
from ..storage.jobdir import JOB_PREFIX, check_directories, job_name
from ..storage.leftovers import DEAD, Leftover
from ..units import format_bytes
from . import output

_DESCRIPTION = """\
List what dead jobs left on storage paths and, with --yes, remove it.

A rank removes its files itself, however it ends. They stay only where everything of the job was killed at once, or the
node went down; the next job of the same node and path removes them, or this command does.

PATH is a directory as it is given to --mlp-offload-path. Only files of yours in job directories of yours
(mlp-offload-JOB) are looked at; links are never followed. A file is dead when

  - its owner ran on this host, and the lock that the owner held is free, or this host has started since;
  - its owner ran elsewhere (or in another container), has not touched the file for ten minutes, which owners do each
    minute, and squeue or qstat says that the job is gone.

Nothing else is removed: what is in use is kept, and so is what nobody can tell about, with the reason.
"""

_EXAMPLES = """\
examples:
  mlp-offload clean /nvme/scratch /lustre/me/scratch           look
  mlp-offload clean /nvme/scratch /lustre/me/scratch --yes     remove what is dead
  mlp-offload clean /lustre/me/scratch --job 4711 --yes        only of job 4711
  mlp-offload clean /lustre/me/scratch --older-than 2d --yes   only what had no sign of life for two days
  srun --ntasks-per-node=1 mlp-offload clean /nvme/scratch     the drives of all nodes of an allocation
"""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_command(commands: Any) -> None:
    """Add ``clean`` to the subcommands of ``mlp-offload``."""
    clean = commands.add_parser(
        "clean",
        help="list and remove what dead jobs left on storage paths",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    clean.add_argument("paths", metavar="PATH", nargs="+", help="directory that holds job directories")
    clean.add_argument("--yes", action="store_true", help="remove what is dead (default: only list)")
    clean.add_argument(
        "--job",
        metavar="ID",
        help="only of this job: its scheduler id, or its name; auto: the job that this command runs in",
    )
    clean.add_argument(
        "--older-than",
        metavar="AGE",
        type=parse_age,
        default=0.0,
        help="of the dead, only what had no sign of life for this long: a number with s, m, h or d",
    )
    output.add_json(clean)
    clean.set_defaults(execute=_execute)


def parse_age(text: str) -> float:
    """Seconds from "90s", "30m", "12h" or "2d".

    Raises:
        argparse.ArgumentTypeError: not such an age.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; write a number with s, m, h or d, as in 12h")
    return float(match[1]) * _UNITS[match[2]]


def _execute(options: argparse.Namespace) -> int:
    directories = check_directories([PathConfig.parse(path).resolved_directory() for path in options.paths])
    for directory in directories:
        if directory.name.startswith(JOB_PREFIX):
            raise ConfigError(f"{directory} is a job directory itself; give its parent, {directory.parent}")
    found = leftovers.find(directories, job_name() if options.job == AUTO else options.job)
    chosen = [item for item in found if item.verdict == DEAD and item.age_seconds >= options.older_than]
    removed, failures = _remove(chosen) if options.yes else ([], [])
    if options.json:
        output.print_json(
            {
                "ok": not failures,
                "removed_bytes": sum(item.nbytes for item in removed),
                "dead_bytes": sum(item.nbytes for item in chosen),
                "errors": failures,
                "found": [_as_json(item, item in removed) for item in found],
            }
        )
    else:
        _tell(found, chosen, removed, options)
        for failure in failures:
            print(f"mlp-offload clean: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _remove(chosen: "Sequence[Leftover]") -> "tuple[list[Leftover], list[str]]":
    """What was removed, and why the rest was not."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    removed, failures = [], []
    for item in track(chosen, "removing", console=console, transient=True, disable=not console.is_terminal):
        try:
            leftovers.remove(item)
            removed.append(item)
        except OffloadError as error:
            failures.append(str(error))
    return removed, failures


def _tell(
    found: "Sequence[Leftover]",
    chosen: "Sequence[Leftover]",
    removed: "Sequence[Leftover]",
    options: argparse.Namespace,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..report.tables import keep_whole

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 240  # a log has no edge at which to wrap
    if found:
        table = Table("", "job", "host", "size", "sign of life", "because", "file", box=None, pad_edge=False)
        for item in found:
            verdict = "removed" if item in removed else item.verdict
            young = item.verdict == DEAD and item not in chosen
            reason = f"{item.reason}; younger than --older-than, kept" if young else item.reason
            cells = (verdict, item.job, item.host or "", format_bytes(item.nbytes), _age(item), reason, str(item.path))
            table.add_row(*cells)
        console.print(keep_whole(table), markup=False, crop=False)
    if not found:
        where = f" of job {options.job}" if options.job else ""
        print(f"nothing{where} on {', '.join(options.paths)}")
    elif options.yes:
        print(f"removed {format_bytes(sum(item.nbytes for item in removed))}, {_count(removed)}")
    elif chosen:
        print(f"dead: {format_bytes(sum(item.nbytes for item in chosen))}, {_count(chosen)}; --yes removes it")
    else:
        print("nothing to remove")


def _count(items: "Sequence[Leftover]") -> str:
    return "1 file" if len(items) == 1 else f"{len(items)} files"


def _age(item: Leftover) -> str:
    for unit in ("d", "h", "m"):
        if item.age_seconds >= 2 * _UNITS[unit]:
            return f"{item.age_seconds / _UNITS[unit]:.0f} {unit} ago"
    return f"{item.age_seconds:.0f} s ago"


def _as_json(item: Leftover, was_removed: bool) -> "dict[str, Any]":
    return {
        "path": str(item.path),
        "job": item.job,
        "host": item.host,
        "bytes": item.nbytes,
        "age_seconds": round(item.age_seconds, 1),
        "verdict": item.verdict,
        "reason": item.reason,
        "removed": was_removed,
    }
