"""``mlp-offload report RUN...``: what the telemetry of a run says, in numbers, words and pictures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import PathConfig
from ..errors import ConfigError, OffloadError
from ..report import draw
from ..report.analysis import Report, analyze
from ..report.numbers import StepNumbers
from ..report.read import Run
from ..report.verdict import Finding, judge
from ..telemetry import StepRecord
from . import output

FOLLOWED_STEPS = 200

_DESCRIPTION = """\
Say what bounds a run and what would help: from the lines that each rank writes with --mlp-offload-telemetry DIR.

RUN is that directory. The newest start in it is reported: times by phase, GB/s of each path beside what was expected of
it, hit rate, rank skew, share of the bound, and a verdict. Several RUNs are put beside each other. It works while the
job runs; a line is written when the next step begins.
"""

_EXAMPLES = """\
examples:
  train with --mlp-offload-telemetry runs/a, then (or meanwhile):
    mlp-offload report runs/a

  while the job runs; ends with it, or with Ctrl-C:
    mlp-offload report runs/a --follow

  to show to others, in one file that needs no network:
    mlp-offload report runs/a --html report.html --png report.png

  did more host memory help?
    mlp-offload report runs/8GiB runs/16GiB

  a single path is not measured at start-up; say what it should give:
    mlp-offload report runs/a --path /nvme/scratch,read=6GB/s,write=3GB/s

The same numbers go to TensorBoard and W&B each --log-interval, as mlp-offload/..., where Megatron writes to them.
"""


def add_command(commands: Any) -> None:
    """Add ``report`` to the subcommands of ``mlp-offload``."""
    report = commands.add_parser(
        "report",
        help="what a run's telemetry says: numbers, a verdict, pictures",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="telemetry directory")
    report.add_argument("--last", metavar="N", type=_count, help="look at the last N steps only (--follow: 200)")
    report.add_argument(
        "--path",
        dest="paths",
        metavar="DIR,read=BYTES/s,write=BYTES/s",
        action="append",
        default=[],
        help="what a path is expected to give, in place of what the run knew; repeat for several",
    )
    report.add_argument("--png", metavar="FILE", type=Path, help="draw a typical step, and the time of all steps")
    report.add_argument("--html", metavar="FILE", type=Path, help="write all of it into one file")
    report.add_argument("--follow", action="store_true", help="show it again and again until the run ends")
    report.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0, help="with --follow: how often to look (default: 2)"
    )
    output.add_json(report)
    report.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    given = _check(options)
    runs = [Run(directory, options.last) for directory in options.runs]
    if options.follow:
        _follow(runs[0], given, options.every)
    else:
        _read(runs, quiet=options.json)
    found = [(str(run.directory), *_judged(run, given)) for run in runs]
    _refuse_unknown(given, runs)
    if options.png or options.html:
        pictures = [_picture(run, report) for run, (_, report, _) in zip(runs, found)]
        _write(options, found, pictures)
    if options.json:
        output.print_json(
            {
                "runs": [
                    {"run": name, "starts": _starts(run), "findings": [vars(f) for f in findings]} | report.as_dict()
                    for run, (name, report, findings) in zip(runs, found)
                ]
            }
        )
    elif not options.follow:
        from rich.console import Console

        from ..report.tables import render

        console = Console(highlight=False)
        console.print(render(found), crop=False)
        for run in runs:
            for note in _notes(run):
                console.print(f"note: {run.directory}: {note}", soft_wrap=True, markup=False)
        for file in filter(None, (options.png, options.html)):
            console.print(f"written: {file}", soft_wrap=True, markup=False)
    return 0


def _check(options: argparse.Namespace) -> "list[PathConfig]":
    """The given rates. Refuses what cannot work before anything is read."""
    if options.follow and (options.json or len(options.runs) > 1):
        raise ConfigError("--follow shows one RUN on the terminal: give one, and no --json")
    if not options.every > 0:
        raise ConfigError(f"--every {options.every:g}: must be above 0 seconds")
    if options.follow and options.last is None:
        options.last = FOLLOWED_STEPS
    for name in ("png", "html"):
        if file := getattr(options, name):
            draw.need_matplotlib()
            output.check_file(f"--{name}", file)
    paths = [PathConfig.parse(spec) for spec in options.paths]
    for path in paths:
        if path.read is None and path.write is None:
            raise ConfigError(f"--path {path.directory}: give its rates, as in {path.directory},read=6GB/s,write=3GB/s")
    return paths


def _read(runs: "Sequence[Run]", quiet: bool) -> None:
    """All that is there, with a bar on a terminal: a long run has written gigabytes."""
    total = sum(file.stat().st_size for run in runs for file in run.files())
    if quiet or not sys.stderr.isatty() or total < 2**26:
        for run in runs:
            run.poll()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        for run in runs:
            run.poll(lambda nbytes: bar.advance(task, nbytes))


def _judged(run: Run, given: "Sequence[PathConfig]") -> "tuple[Report, list[Finding]]":
    logs = run.require_steps()
    headers = {rank: log.header for rank, log in logs.items() if log.header}
    rates = {directory: (path.read, path.write) for path in given for directory in _meant(path, run)}
    report = analyze({rank: list(log.steps) for rank, log in logs.items()}, headers, rates)
    return report, judge(report)


def _meant(given: PathConfig, run: Run) -> "list[str]":
    """The paths of the run that are called so, in full or as the table calls them; at most one."""
    names = draw.short_names(run.paths())
    wanted = (given.directory, given.resolved_directory())
    return [path for path in names if path in wanted] or [
        path for path, name in names.items() if name == given.directory
    ]


def _refuse_unknown(given: "Sequence[PathConfig]", runs: "Sequence[Run]") -> None:
    """A --path that none of the runs has would change nothing."""
    for path in given:
        if not any(_meant(path, run) for run in runs):
            known = ", ".join(dict.fromkeys(name for run in runs for name in run.paths())) or "none"
            raise ConfigError(f"--path {path.directory}: no such path; paths: {known}")


def _notes(run: Run) -> "list[str]":
    """What a reader should know beside the numbers."""
    notes, current = [], run.current()
    if _starts(run) > 1:
        notes.append(f"started {_starts(run)} times; this is the newest start that made a step")
    if any(log.starting for log in run.logs.values()):
        notes.append("it has been started again since, and has not made a step yet")
    if len(current) < len(run.logs):
        left = ", ".join(str(rank) for rank in sorted(run.logs) if rank not in current)
        notes.append(f"ranks {left} took no part in the newest start")
    torn = sum(log.torn_count for log in run.logs.values())
    if torn:
        notes.append(f"{torn} lines were torn off in the middle (a killed rank) or damaged, and left out")
    return notes


def _starts(run: Run) -> int:
    return max(log.start_count for log in run.logs.values())


def _follow(run: Run, given: "Sequence[PathConfig]", every: float) -> None:
    """Show the report until the run ends or Ctrl-C. Files may appear later."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from ..report.tables import render

    console = Console(highlight=False)
    told, changed = 0, time.monotonic()
    terminal = console.is_terminal
    try:
        with (
            Live(console=console, auto_refresh=False, vertical_overflow="visible")
            if terminal
            else nullcontext() as live
        ):
            while True:
                if run.poll():
                    changed = time.monotonic()
                over = run.over()
                try:
                    report, findings = _judged(run, given)
                except OffloadError as error:
                    if over:
                        return  # told by who looks next
                    shown, newest = Text(f"waiting: {error}"), 0
                else:
                    _refuse_unknown(given, [run])
                    newest = report.steps[1]
                    shown = render([(str(run.directory), report, findings)])
                    if not terminal and newest != told:
                        line = f"step {newest} | p50 {report.step_p50:.3f} s | stall {report.phases['stall'].share:.0%}"
                        print(f"{line} | {findings[0].kind}", flush=True)
                if live is not None:
                    state = over or f"following; newest line {time.monotonic() - changed:.0f} s ago, Ctrl-C ends"
                    live.update(Group(shown, Text(f"\n{state}", style="bold")), refresh=True)
                elif newest == 0 and told == 0:
                    print(shown.plain, flush=True)
                    told = -1
                told = newest or told
                if over:
                    if live is None:
                        print(over, flush=True)
                    return
                time.sleep(every)
    except KeyboardInterrupt:
        print("stopped following; the run goes on")


def _picture(run: Run, report: Report) -> "tuple[StepRecord, list[StepNumbers], str, str]":
    rank, number = report.typical_step
    log = run.logs[rank]
    (step,) = [s for s in log.steps if s.step == number]
    steps = [s for s in log.steps if s.step > 1] or list(log.steps)
    above = f"{run.directory}, rank {rank}: a typical step, {number}"
    return log.record(step), steps, above, f"rank {rank}: steps {steps[0].step} to {steps[-1].step}"


def _write(
    options: argparse.Namespace,
    found: "Sequence[tuple[str, Report, list[Finding]]]",
    pictures: "Sequence[tuple[StepRecord, list[StepNumbers], str, str]]",
) -> None:
    if options.png:
        draw.save_png(draw.figure(pictures), options.png)
    if options.html:
        from ..report.html import page

        svgs = [tuple(draw.to_svg(draw.figure([p], dark), dark) for dark in (False, True)) for p in pictures]
        text = page(found, svgs, __version__, time.strftime("%Y-%m-%d %H:%M"))
        try:
            options.html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OffloadError(f"--html {options.html}: {error.strerror}") from error


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return value
