"""What checksums cost: the same optimizer steps with and without them, in turn, in one run.

    python benchmarks/checksum.py --paths /nvme/scratch /lustre/me [--params 60] [--pairs 10] [--json OUT]

Prints the ratio of step times (with / without) over pairs of adjacent steps, and the speed of crc32c on one core beside
that of a copy. Checksums are computed in the I/O threads, so on a machine with a core to spare the step hides them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from mlp_offload import OffloadedAdamW, _native

SUBGROUP_SIZE = 2**21


def step_ratios(paths: "list[str]", million: float, pairs: int) -> "list[float]":
    """Seconds of a step with checksums over seconds of one without, for each pair; the first two pairs are dropped."""
    parameter = torch.nn.Parameter(torch.randn(int(million * 1e6)))
    parameter.grad = torch.randn_like(parameter)
    options = {"paths": paths, "subgroup_size": SUBGROUP_SIZE, "host_memory": 8 * 12 * SUBGROUP_SIZE}
    optimizers = {
        on: OffloadedAdamW([parameter], checksums=on, name=f"checksums-{on}", **options) for on in (True, False)
    }
    ratios = []
    try:
        for _ in range(pairs + 2):
            seconds = {}
            for on, optimizer in optimizers.items():
                begin = time.monotonic()
                optimizer.step()
                optimizer._pipeline.tiers.settle()  # flushes of this step, too
                seconds[on] = time.monotonic() - begin
            ratios.append(seconds[True] / seconds[False])
    finally:
        for optimizer in optimizers.values():
            optimizer.close()
    return ratios[2:]


def bytes_per_second(function, nbytes: int, repeats: int = 9) -> float:
    """Median speed of ``function()`` over ``nbytes``."""
    seconds = []
    for _ in range(repeats):
        begin = time.monotonic()
        function()
        seconds.append(time.monotonic() - begin)
    return nbytes / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--params", type=float, default=60, help="million parameters (default: 60)")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", metavar="OUT", help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios = step_ratios(options.paths, options.params, options.pairs)
    memory = torch.randint(0, 255, (256 * 2**20,), dtype=torch.uint8)
    target = torch.empty_like(memory)
    result = {
        "step_ratio_median": statistics.median(ratios),
        "step_ratio_min": min(ratios),
        "step_ratio_max": max(ratios),
        "pairs": len(ratios),
        "crc32c_bytes_per_second": bytes_per_second(
            lambda: _native.crc32c(memory.data_ptr(), memory.numel()), memory.numel()
        ),
        "copy_bytes_per_second": bytes_per_second(lambda: target.copy_(memory), memory.numel()),
    }
    for name, value in result.items():
        print(f"{name:<26} {value:.4g}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
