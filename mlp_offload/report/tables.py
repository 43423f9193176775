"""The numbers of a run as rows of text, for the terminal and for HTML."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import format_bytes, format_rate
from .analysis import PathUse, Report
from .draw import short_names
from .verdict import Finding

DEFINITIONS = (
    "Times of a step are those of its slowest rank; the first step of a start is not counted. Phases overlap: seconds in which "
    "one was under way (median), and their share of the time in steps; flushes go on after a step has returned.",
    "Share of the bound: bytes moved over what the paths could have moved at their expected rates while a step or its "
    "transfers were under way, in the direction that limits.",
)
PATH_WIDTH = 16
"""Characters of a path's name in a line: the table then fits 80 columns."""
PATH_COLUMNS = ("path", "", "a step", "while busy", "expected", "of it", "busy", "a day")


def rows(report: Report) -> "list[tuple[str, str]]":
    """(what, value) of a run, in the order of reading."""
    count, nodes = len(report.ranks), report.node_count
    steps = f"{report.step_count}, {report.steps[0]} to {report.steps[1]}"
    if report.iterations:
        steps += f" (iterations {report.iterations[0]} to {report.iterations[1]})"
    found = [
        ("ranks", f"{count} on {nodes} node{'s' if nodes > 1 else ''}"),
        ("steps", steps),
        (
            "step",
            f"p50 {seconds(report.step_p50)} | p99 {seconds(report.step_p99)} | longest {seconds(report.step_max)}",
        ),
    ]
    if report.iteration_p50:
        share = report.step_p50 / report.iteration_p50
        found.append(("iteration", f"{seconds(report.iteration_p50)}, of which the step is {share:.0%}"))
    for name, phase in report.phases.items():
        more = f" | p99 {seconds(report.stall_p99)}" if name == "stall" else ""
        found.append((f"  {name}", f"{seconds(phase.seconds)}, {phase.share:.0%} of the step{more}"))
    if report.paths and report.efficiency is None:
        found.append(("share of the bound", "the paths' rates are not known; give --path"))
    elif report.paths:
        low = ": the paths are faster than expected" if report.efficiency > 1.05 else ""
        found.append(("share of the bound", f"{report.efficiency:.0%}{low}"))
    planned = "" if report.planned_hit_rate is None else f", planned {report.planned_hit_rate:.0%}"
    found.append(("hit rate", f"{report.hit_rate:.0%} of subgroups found in host memory{planned}"))
    if report.skew:
        skew = report.skew
        found.append(
            (
                "rank skew",
                f"slowest {skew.slowest_over_median:.2f}x the median; rank {skew.rank} in {skew.share_of_steps:.0%} of the steps",
            )
        )
    state = f"; the state is {format_bytes(report.state_bytes)} on all ranks" if report.state_bytes else ""
    found.append(("host memory", f"{format_bytes(report.host_memory_bytes)} a rank{state}"))
    for name, ends in (("loss", report.loss), ("gradient norm", report.grad_norm)):
        if ends:
            found.append((name, f"first {ends[0]:.4g}, last {ends[1]:.4g}"))
    return found


def path_cells(use: PathUse, name: str = "") -> "tuple[str, ...]":
    """The cells below ``PATH_COLUMNS``; ``name``: shown for the path."""
    known = use.known_bytes_per_second
    return (
        name or use.path,
        use.direction,
        format_rate(use.bytes_a_step).removesuffix("/s"),
        format_rate(use.bytes_per_second),
        format_rate(known) if known else "not known",
        f"{use.bytes_per_second / known:.0%}" if known else "",
        f"{use.busy_share:.0%}",
        f"{use.bytes_a_day / 1e12:.3g} TB" if use.bytes_a_day is not None and use.direction == "write" else "",
    )


def seconds(value: float) -> str:
    """ "1.20 ms", "120 ms" or "1.20 s"."""
    return f"{value * 1e3:.2f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def render(runs: "Sequence[tuple[str, Report, Sequence[Finding]]]") -> RenderableType:
    """(name, report, findings) of one run, or of several beside each other, for a terminal; print it with ``crop=False``."""
    several = len(runs) > 1
    table = Table(
        title=None if several else runs[0][0], title_justify="left", show_header=several, box=None, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for name, _, _ in runs:
        table.add_column(name, overflow="fold")
    for label, values in side_by_side(runs):
        table.add_row(label, *values)
    parts: "list[RenderableType]" = [table]
    for name, report, findings in runs:
        parts += [Text(f"\n{name}" if several else "")]
        if report.paths:
            paths = Table(box=None, pad_edge=False)
            for i, column in enumerate(PATH_COLUMNS):
                paths.add_column(column, justify="left" if i < 2 else "right", no_wrap=i > 0)
            names = short_names(list(dict.fromkeys(use.path for use in report.paths)))
            for use in report.paths:
                paths.add_row(*path_cells(use, names[use.path]))
            # fixed, as the others may not wrap and would leave it nothing
            paths.columns[0].width = min(PATH_WIDTH, max(map(cell_len, names.values())))
            full = [Text(f"{name}: {path}", style="dim") for path, name in names.items() if name != path]
            parts += [keep_whole(paths), *full, Text("")]
        parts += [Text(f"> {finding.text}", style="bold" if i == 0 else "") for i, finding in enumerate(findings)]
    return Group(*parts, Text(""), *(Text(line, style="dim") for line in DEFINITIONS))


def keep_whole(table: Table) -> Table:
    """The table, whose cells are never cut: those that may not wrap keep their width, the others fold. Print it with
    ``crop=False``: where there is less room than it needs, the terminal wraps its lines."""
    for column in table.columns:
        column.overflow = "fold"
        if column.no_wrap:
            column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return table


def side_by_side(runs: "Sequence[tuple[str, Report, Sequence[Finding]]]") -> "list[tuple[str, list[str]]]":
    """(what, its value in each run); empty where a run has none."""
    tables = [dict(rows(report)) for _, report, _ in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label, "") for table in tables]) for label in labels]
