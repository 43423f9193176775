"""``mlp-offload run SCRIPT ...``: the command line of ``megatron.launcher``."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Run a Megatron training script, unmodified, with the offload flags added to its own.

SCRIPT is a file, or `pretrain_gpt` for the GPT pre-training that comes with this package
(the megatron-core wheel has none). Everything after SCRIPT goes to it.
"""

_EXAMPLES = """\
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


def add_command(commands: Any) -> None:
    """Add ``run`` to the subcommands of ``mlp-offload``."""
    run = commands.add_parser(
        "run",
        help="run a Megatron script with optimizer offload",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("script", metavar="SCRIPT", help="a Megatron script, or pretrain_gpt")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    run.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    from ..megatron.launcher import run  # torch and Megatron, which the other commands do without

    run(options.script, options.arguments)
    return 0
