"""Print a recipe's flags for a script; see the package's docstring."""

from __future__ import annotations

import argparse
import sys

from ..errors import OffloadError
from . import NAMES, load, parse_gpu_memory, small


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mlp_offload.recipes", description="Print the flags of a recipe, one a line."
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--gpu-memory", metavar="BYTES", default="80GB", help="of a GPU (default: %(default)s)")
    parser.add_argument("--nodes", action="store_true", help="print how many nodes it needs instead")
    parser.add_argument("--small", action="store_true", help="two layers, for two processes without a GPU")
    options = parser.parse_args()
    try:
        recipe = load(options.name, parse_gpu_memory(options.gpu_memory))
    except OffloadError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if options.nodes:
        print(1 if options.small else recipe.nodes)
    else:
        print("\n".join(small(recipe) if options.small else recipe.flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
