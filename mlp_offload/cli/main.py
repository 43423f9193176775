"""The ``mlp-offload`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import patch

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

_RUN_DESCRIPTION = """\
Run a Megatron training script, unmodified, with the offload flags added to its own.

SCRIPT is a file, or `pretrain_gpt` for the GPT pre-training that comes with this package
(the megatron-core wheel has none). Everything after SCRIPT goes to it.
"""

_RUN_EXAMPLES = """\
examples:
  all flags of the script, Megatron's and ours:
    mlp-offload run pretrain_gpt --help

  two ranks on this machine, state on two directories, at most 1 GiB of host memory a rank:
    torchrun --nproc-per-node 2 --no-python mlp-offload run pretrain_gpt ... \\
        --use-distributed-optimizer --optimizer-offload mlp \\
        --mlp-offload-path /nvme/scratch --mlp-offload-path /lustre/me/scratch \\
        --mlp-offload-host-memory 1GiB

  one task a GPU under SLURM (a failing rank ends the others):
    srun --kill-on-bad-exit=1 mlp-offload run Megatron-LM/pretrain_gpt.py ... \\
        --optimizer-offload mlp --mlp-offload-path '$SLURM_TMPDIR'
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line: one subcommand a job."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mlp-offload", description=_DESCRIPTION, epilog=_EXAMPLE, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mlp-offload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a Megatron script with optimizer offload",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EXAMPLES,
        formatter_class=raw,
    )
    run.add_argument("script", metavar="SCRIPT", help="a Megatron script, or pretrain_gpt")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    patch.add_command(commands)
    return parser


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run one command; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command == "run":
        from ..megatron.launcher import run

        run(options.script, options.arguments)
    if options.command == "patch":
        return patch.run(options.action, options.directory, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
