"""``mlp-offload doctor [PATH...]``: what was built, what this node allows, and whether the paths take state."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from . import output
from .check_machine import check_machine
from .check_paths import check_paths
from .check_software import check_software, native_module
from .findings import NOTE, OK, PROBLEM, Finding

_DESCRIPTION = """\
Find out what stops a run here, or slows it, before it starts: what was built and what it builds on,
what kernel, limits and batch system allow, and whether each PATH takes state files. Things are
tried, small, and taken away again; nothing is measured (that is `mlp-offload probe`).

Each finding is ok, a note (a run works) or a problem (it stops a run), with what to do about it.
The exit status is 1 when there is a problem.
"""

_EXAMPLES = """\
examples:
  this node, and the paths of the run to come:
    mlp-offload doctor /nvme/scratch /lustre/me/scratch

  inside a job, where limits, memory and scratch directories are those of the run:
    srun --ntasks-per-node=1 mlp-offload doctor "$SLURM_TMPDIR" /lustre/me/scratch

  only what matters, for a script:
    mlp-offload doctor --json /nvme/scratch | jq '.findings[] | select(.level != "ok")'
"""

_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def add_command(commands: Any) -> None:
    """Add ``doctor`` to the subcommands of ``mlp-offload``."""
    doctor = commands.add_parser(
        "doctor",
        help="find out what stops or slows a run on this node and on paths",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("paths", metavar="PATH", nargs="*", help="a directory, as in --mlp-offload-path")
    output.add_json(doctor)
    doctor.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    from rich.console import Console

    # On standard error, so that the table can be redirected.
    status = (
        nullcontext() if options.json else Console(stderr=True).status("looking around; loading PyTorch takes a while")
    )
    with status:
        findings = list(examine(options.paths))
    problem_count = sum(finding.level == PROBLEM for finding in findings)
    if options.json:
        items = {"ok": problem_count == 0, "problem_count": problem_count}
        output.print_json(items | {"findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return 1 if problem_count else 0


def examine(paths: Sequence[str]) -> "Iterator[Finding]":
    """All findings, in the order of the table."""
    native, _ = native_module()
    yield from check_software()
    yield from check_machine(native)
    yield from check_paths(paths, native)


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    for area in dict.fromkeys(finding.area for finding in findings):
        table = Table("", "", "found", "what to do", title=Text(area, style="bold"), title_justify="left", expand=True)
        for column, (share, width) in zip(table.columns, ((None, 7), (None, 18), (3, None), (2, None))):
            column.ratio, column.width = share, width
        for finding in findings:
            if finding.area == area:
                level = Text(finding.level, style=_STYLES[finding.level])
                # Text, because what was found may have brackets, which rich reads as styles.
                cells = (Text(text, overflow="fold") for text in (finding.subject, finding.found, finding.advice))
                table.add_row(level, *cells)
        console.print(table)
    counts = Counter(finding.level for finding in findings)
    problems = f"{counts[PROBLEM]} problem{'s' if counts[PROBLEM] != 1 else ''}"
    verdict = f"{problems}: a run will not work here" if counts[PROBLEM] else "nothing stops a run"
    console.print(f"{verdict}; {counts[NOTE]} notes, {counts[OK]} ok", highlight=False)
