"""The ``mlp-offload`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import OffloadError
from . import clean, completion, doctor, output, patch, plan, probe, report, run, simulate

COMMANDS = (run, doctor, probe, plan, simulate, report, clean, patch)
"""Modules with ``add_command(commands)``, in the order of the help; each makes a parser whose default ``execute`` is a
function of the parsed options that gives the exit status, and gives it ``--json`` by ``output.add_json``."""

_DESCRIPTION = """\
Optimizer-state offload for Megatron-LM: fp32 master weights and Adam moments live in
host memory and on storage paths; the model and its numbers stay those of the stock optimizer.
"""

_EXAMPLE = """\
example:
  torchrun --nproc-per-node 2 --no-python mlp-offload run pretrain_gpt ... \\
      --use-distributed-optimizer --optimizer-offload mlp \\
      --mlp-offload-path /nvme/scratch --mlp-offload-path /lustre/me/scratch

`mlp-offload run --help` explains it and shows more.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line: one subcommand a job."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mlp-offload", description=_DESCRIPTION, epilog=_EXAMPLE, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mlp-offload {__version__}")
    completion.add_option(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(commands)
    return parser


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run one command; returns the exit status: 1 where it could not do its work, 2 where the command line is wrong, and
    130 or 141 as a shell has it after Ctrl-C and where the reader of the output has gone."""
    parser = build_parser()
    try:
        with output.watch_stdout():
            options = _parse(parser, list(sys.argv[1:] if argv is None else argv))
            if options.command is None:
                parser.print_help(sys.stderr)
                return 2
            if options.command != "run":
                return _execute(options)
        return _execute(options)  # the script's output and signals are its own business
    except output.OutputError as error:
        return output.tell_output_failure(error)
    except KeyboardInterrupt:
        print("mlp-offload: interrupted", file=sys.stderr)
        return output.INTERRUPTED


def _execute(options: argparse.Namespace) -> int:
    try:
        return options.execute(options)
    except OffloadError as error:
        output.tell_failure(options, error)
        return 1


def _parse(parser: argparse.ArgumentParser, arguments: "list[str]") -> argparse.Namespace:
    """The options. A command with ``takes_more`` gets all that follows ``--`` as ``more``: argparse mixes it up with its own."""
    options, rest = parser.parse_known_args(arguments)
    if getattr(options, "takes_more", False) and "--" in arguments:
        end = arguments.index("--")
        options = parser.parse_args(arguments[:end])
        options.more = arguments[end + 1 :]
    elif rest:
        options = parser.parse_args(arguments)  # tells what it does not know
    return options


if __name__ == "__main__":
    sys.exit(main())
