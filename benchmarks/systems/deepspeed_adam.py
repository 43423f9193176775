"""DeepSpeedCPUAdam on tensors in memory, for ``benchmarks/adam.py``; runs in DeepSpeed's own environment.

Arguments: elements, threads. Then one answer in seconds to each line: "step" (fp32 gradients, the step alone), "fp32" (and
the copy of the weights to bf16 that follows it in training), "bf16" (and bf16 gradients widened before it).
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    numel, threads = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like
    parameter = torch.nn.Parameter(torch.randn(1000).repeat(numel // 1000))
    gradient = torch.full_like(parameter, 0.01)
    narrow = gradient.to(torch.bfloat16)
    weight = torch.empty(parameter.shape, dtype=torch.bfloat16)
    parameter.grad = gradient
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-5)
    optimizer.step()
    print("ready", file=answers)
    for line in sys.stdin:
        begin = time.monotonic()
        if line.strip() == "bf16":
            gradient.copy_(narrow)
        optimizer.step()
        if line.strip() != "step":
            weight.copy_(parameter.detach())
        print(time.monotonic() - begin, file=answers)


if __name__ == "__main__":
    main()
