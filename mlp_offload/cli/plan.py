"""``mlp-offload plan MODEL``: what a training needs, whether it fits, how long it takes; without torch and without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from .. import recipes
from ..errors import ConfigError
from ..plan.devices import GPU_ADAM_RATE
from . import output

DOES_NOT_FIT = 3

_DESCRIPTION = """\
Say what a training needs on each GPU, in each node's memory and on each path, whether it fits, what would make it fit, and
how long an iteration and a last checkpoint take. Needs no GPU, no torch and no Megatron.

MODEL is a recipe, or a file of Megatron flags (one or many a line, `#` begins a comment). Flags after `--` are added to it,
or are the whole model. No tokenizer is read, so --vocab-size has to be among them. What a number rests on is printed below
it; activations, compute and the CPU's speed are estimates.
"""

_EXAMPLES = f"""\
recipes: {", ".join(recipes.NAMES)}

examples:
  a recipe on the nodes it was made for, then on GPUs of 40 GB, then with other flags:
    mlp-offload plan gpt-70b
    mlp-offload plan gpt-70b --gpu-memory 40GB
    mlp-offload plan gpt-70b --nodes 1 -- --grad-reduce-in-bf16

  a command line of your own, two paths of known speed, as JSON and as a picture:
    mlp-offload plan --nodes 4 --path '/nvme,read=6GB/s,write=4GB/s,capacity=3TB' --path '/lustre/me,read=2GB/s,write=2GB/s' \\
        --host-memory 512GiB --json --png plan.png -- --num-layers 32 --hidden-size 4096 ...

  will it end in time when the job is preempted, and how long does the drive live?
    mlp-offload plan gpt-70b --grace 600 --path /nvme,read=6GB/s,write=4GB/s --endurance '/nvme,dwpd=1,size=3.84TB'

  a part of the state in spare GPU memory:
    mlp-offload plan gpt-20b -- --mlp-offload-gpu-memory 20GiB

  all recipes in one table:
    mlp-offload plan --recipes

exit status: 0 it fits, {DOES_NOT_FIT} it does not, 1 it cannot be told, 2 the command line is wrong
"""


def add_command(commands: Any) -> None:
    """Add ``plan`` to the subcommands of ``mlp-offload``."""
    plan = commands.add_parser(
        "plan",
        help="what a training needs, whether it fits, how long it takes",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mlp-offload plan [MODEL] [OPTIONS] [-- MEGATRON FLAGS...]",
    )
    plan.add_argument("model", metavar="MODEL", nargs="?", help="a recipe, or a file of Megatron flags")
    plan.add_argument("--recipes", action="store_true", help="list the recipes with what they need")
    plan.add_argument("--markdown", action="store_true", help="with --recipes: the table in Markdown")
    nodes = plan.add_argument_group("the machine")
    nodes.add_argument(
        "--nodes", type=int, metavar="N", help="default: the recipe's, or the fewest that hold TP x PP x CP"
    )
    nodes.add_argument("--gpus-per-node", type=int, metavar="N", help="default: the recipe's, or 4")
    nodes.add_argument("--gpu-memory", metavar="BYTES", default="80GB", help="of a GPU (default: %(default)s)")
    nodes.add_argument(
        "--gpu-reserve",
        metavar="BYTES",
        default="4GiB",
        help="of it, for CUDA, NCCL and what no formula counts (default: %(default)s)",
    )
    nodes.add_argument(
        "--host-memory", metavar="BYTES", help="of a node (default: 512GiB, which is then an assumption)"
    )
    nodes.add_argument(
        "--host-reserve", metavar="BYTES", default="6GiB", help="of it, for each rank's process (default: %(default)s)"
    )
    nodes.add_argument(
        *("--path",),
        action="append",
        default=[],
        metavar="DIR[,read=BYTES/s][,write=BYTES/s][,capacity=BYTES]",
        help="a path of every node, with the rates of the whole node; those not given are taken from what start-up or "
        "--probe measured here for that device",
    )
    nodes.add_argument("--probe", action="store_true", help="measure paths whose rates are not known, here and now")
    nodes.add_argument(
        *("--endurance",),
        action="append",
        default=[],
        metavar="DIR,tbw=BYTES | DIR,dwpd=N,size=BYTES",
        help="what the drive of a path may be written in its life (dwpd: for five years, or years=N)",
    )
    speed = plan.add_argument_group("the speed")
    speed.add_argument(
        "--adam-rate", type=float, metavar="N", help="parameters a second that a rank's CPU updates (default: 1e9)"
    )
    speed.add_argument("--copy-rate", metavar="BYTES/s", help="between a GPU and its host, each way (default: 20GB/s)")
    speed.add_argument(
        "--gpu-adam-rate",
        type=float,
        metavar="N",
        help=f"parameters a second that a GPU updates, with --mlp-offload-gpu-memory (default: {GPU_ADAM_RATE:g})",
    )
    speed.add_argument("--compute-seconds", type=float, metavar="S", help="forward and backward of an iteration")
    speed.add_argument("--tokens-per-second", type=float, metavar="N", help="of the job in forward and backward")
    speed.add_argument("--gpu-flops", type=float, metavar="N", help="peak of a GPU, FLOP/s (default: 312e12)")
    speed.add_argument(
        "--mfu", type=float, metavar="SHARE", help="share of it that forward and backward reach (default: 0.35)"
    )
    speed.add_argument(
        "--save-rate", metavar="BYTES/s", help="at which a node writes a checkpoint (default: as to its last path)"
    )
    speed.add_argument("--grace", type=float, metavar="S", help="seconds between the signal to stop and the kill")
    plan.add_argument("--png", metavar="FILE", type=Path, help="draw memory and paths beside what there is")
    output.add_json(plan)
    plan.set_defaults(execute=_execute, takes_more=True, more=[])


def _execute(options: argparse.Namespace) -> int:
    from . import plan_json, plan_text  # what only this command needs
    from .plan_build import make_plan, recipe_row

    if options.recipes:
        rows = [recipe_row(name, size) for name in recipes.NAMES for size in (40, 80)]
        if options.json:
            output.print_json({"recipes": rows})
        else:
            print(plan_text.recipes_markdown(rows)) if options.markdown else plan_text.show_recipes(rows)
        return 0
    if options.png:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--png needs matplotlib: pip install 'mlp-offload[examples]', or matplotlib alone")
        output.check_file("--png", options.png)
    plan = make_plan(options)
    if options.png:
        from .plan_picture import draw

        draw(plan, options.png)
    if options.json:
        output.print_json(plan_json.as_items(plan))
    else:
        plan_text.show(plan)
        if options.png:
            print(f"picture: {options.png}")
    return 0 if plan.need.fits else DOES_NOT_FIT
