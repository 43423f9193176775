"""What a GPU does in an offloaded step, beside what the machine gives: transfers, Adam, overlap, bits, GPU memory.

    python benchmarks/gpu.py [--device cuda|cpu] [--params 64] [--path DIR] [--rounds 5] [--json OUT]
    python benchmarks/gpu.py --kernels-once

transfers   gradients to the host and weights back, GB/s of bf16: from one piece of memory, from pieces of 128 KiB in one
            launch, from the same as single copies; beside `torch`, a plain copy_ between the GPU and pinned memory
adam        one update of a record in the device's memory, with fp32 masters and with remainders; beside `copy`, a copy
            in the same memory that reads and writes as many bytes in all
overlap     an OffloadedAdamW with weights on the device and most of its state on a path: seconds a step over the largest of
            its parts, which are the storage (time with a fetch or flush under way), the CPU kernel alone and the copies
            at the rate above. 1.0 = all else is hidden
bits_equal  weights and state after three steps with weights on the device and with weights on the CPU: the same bits
memory      GPU bytes that the optimizer holds between steps, beside weights and gradients

With --device cpu there are no transfers and no GPU memory; the rest runs on the CPU. --kernels-once runs each CUDA kernel
once on little memory, for compute-sanitizer. The last line is the result as JSON. Fails where bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from mlp_offload import OffloadedAdamW, transfers  # noqa: E402
from mlp_offload.adam.kernel import DTYPE_CODES, AdamKernel, Segment, adam_scalars, default_threads  # noqa: E402
from mlp_offload.cuda import NORM_SUMS_NUMEL, CudaKernels, NormTensor, Piece  # noqa: E402
from mlp_offload.plan.subgroups import cut  # noqa: E402
from mlp_offload.telemetry import union_seconds  # noqa: E402

SMALL_PIECE, GAP = 2**16, 64
"""Elements of a small piece, and between two: what Megatron pads parameters to."""
SCALARS = adam_scalars(1e-3, (0.9, 0.95), 1e-8, 0.1, step=3)
BF16 = DTYPE_CODES[torch.bfloat16]


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the weights are")
    parser.add_argument("--params", type=float, default=64, help="10**6 parameters (default: 64)")
    parser.add_argument("--path", type=Path, help="directory for state on storage (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over so many (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--kernels-once", action="store_true", help="each CUDA kernel once, nothing measured")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: use --device cpu for what runs without one")
    if not 0.01 <= options.params <= 1000 or options.rounds < 1:
        parser.error("--params must be between 0.01 and 1000, --rounds at least 1")
    if options.kernels_once:
        kernels_once()
        return 0
    with tempfile.TemporaryDirectory(dir=options.path) as directory:
        result = measure(options.device, int(options.params * 1e6), options.rounds, Path(directory))
    text = json.dumps(result)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return 0 if all(result["bits_equal"].values()) else 1


def measure(device: str, numel: int, rounds: int, directory: Path) -> "dict[str, Any]":
    """All of it; rates are in GB/s."""
    gpu = device == "cuda"
    rates = transfer_rates(numel, rounds) if gpu else None
    overlap, memory = overlapped_step(device, numel, rounds, directory, rates)
    return {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "params": numel,
        "transfers": rates,
        "adam": {name: adam_rate(device, numel, n, rounds) for name, n in (("full", 4), ("remainder", 2))},
        "overlap": overlap,
        "bits_equal": {dtype: same_bits(device, directory, getattr(torch, dtype)) for dtype in ("bfloat16", "float32")},
        "memory": memory,
    } | ({"transfers_over_torch": _ratios(rates)} if gpu else {})


# ------------------------------------------------------------------------------------------- transfers


def transfer_rates(numel: int, rounds: int) -> "dict[str, dict[str, float]]":
    """GB/s of bf16 to the host and to the device, by what is moved how."""
    whole, pinned = torch.zeros(numel, dtype=torch.bfloat16, device="cuda"), _pinned(numel)
    found = {
        "torch": {
            "to_host": _rate(2 * numel, rounds, lambda: pinned.copy_(whole, non_blocking=True)),
            "to_device": _rate(2 * numel, rounds, lambda: whole.copy_(pinned, non_blocking=True)),
        }
    }
    most_copies = transfers._MOST_COPIES
    for name, piece, gap, most in (
        ("one piece", -(-numel // 16), 0, most_copies),
        ("small pieces, one launch", SMALL_PIECE, GAP, most_copies),
        ("small pieces, copies", SMALL_PIECE, GAP, 10**9),
    ):
        transfers._MOST_COPIES = most
        starts = range(0, numel - piece + 1, piece + gap)
        shards = [whole[start : start + piece] for start in starts]
        (subgroup,) = cut([piece] * len(shards), piece * len(shards))
        mover = transfers.CudaTransfers(shards, subgroup.numel, reads_weights=False)

        def fetch(mover: Any = mover, shards: Any = shards, subgroup: Any = subgroup) -> None:
            mover.begin(shards)
            mover.prepare(subgroup)
            mover.addresses(subgroup)

        def send(mover: Any = mover, subgroup: Any = subgroup) -> None:
            mover.send(subgroup)
            mover.end()

        rates = {"to_host": [], "to_device": []}
        for _ in range(rounds + 1):  # to_device needs a fetch before it
            for direction, work in (("to_host", fetch), ("to_device", send)):
                rates[direction].append(2 * subgroup.numel / _seconds(work) / 1e9)
        found[name] = {direction: statistics.median(each[1:]) for direction, each in rates.items()}
    transfers._MOST_COPIES = most_copies
    return found


def _ratios(rates: "dict[str, dict[str, float]]") -> "dict[str, dict[str, float]]":
    plain = rates["torch"]
    return {name: {d: r / plain[d] for d, r in each.items()} for name, each in rates.items() if name != "torch"}


# ------------------------------------------------------------------------------------------------ Adam


def adam_rate(device: str, numel: int, main_itemsize: int, rounds: int) -> "dict[str, float]":
    """GB/s read and written by an update in the device's own memory, and by a copy there."""
    (subgroup,) = cut([numel], numel, main_itemsize)
    record = torch.zeros(subgroup.record_bytes, dtype=torch.uint8, device=device)
    grad, weight = (torch.full((numel,), 0.01, dtype=torch.bfloat16, device=device) for _ in range(2))
    rows = np.array([[0, numel, grad.data_ptr(), weight.data_ptr(), BF16, BF16, 0]])
    # State is read and written; so is the weight with remainders, without them it is written only.
    nbytes = numel * (2 * (main_itemsize + 8) + 2 + (4 if main_itemsize == 2 else 2))
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    update = _update(device)
    arguments = record.data_ptr(), subgroup.stride_numel, rows, [SCALARS], main_itemsize
    found = {
        "update": _rate(nbytes, rounds, lambda: update(*arguments)),
        "copy": _rate(nbytes, rounds, lambda: target.copy_(source)),
    }
    return found | {"update_over_copy": found["update"] / found["copy"]}


def _update(device: str) -> "Callable[..., None]":
    if device == "cpu":
        return AdamKernel(default_threads(1)).update
    kernels = CudaKernels(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    return lambda *arguments: kernels.update(*arguments, stream=stream)


# --------------------------------------------------------------------------------------- an offloaded run


def overlapped_step(
    device: str, numel: int, rounds: int, directory: Path, rates: "dict[str, dict[str, float]] | None"
) -> "tuple[dict[str, float], dict[str, int] | None]":
    """(step seconds, its parts and their relation; GPU memory of the optimizer between steps)."""
    piece = -(-numel // 16)
    params = [torch.full((piece,), 0.5, dtype=torch.bfloat16, device=device) for _ in range(16)]
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    before = _gpu_memory(device)
    (subgroup,) = cut([piece], piece, main_itemsize=2)
    buffer_bytes = -(-subgroup.record_bytes // 4096) * 4096
    optimizer = OffloadedAdamW(
        params, paths=[str(directory)], subgroup_size=piece, host_memory=6 * buffer_bytes, name="overlap"
    )
    steps = []
    try:
        for _ in range(rounds + 1):
            seconds = _seconds(optimizer.step, device)
            record = optimizer.last_record
            storage = union_seconds((e.begin, e.end) for e in record.events if e.phase in ("fetch", "flush"))
            moved = sum(record.bytes_read.values()) + sum(record.bytes_written.values())
            steps.append((seconds, storage, moved))
        after = _gpu_memory(device)
    finally:
        optimizer.close()
    steps = steps[1:]
    parts = {"storage": statistics.median(s[1] for s in steps), "cpu_update": 16 * _kernel_seconds(piece, rounds)}
    if rates is not None:  # gradients and old weights come, new weights go
        way = rates["one piece"]
        parts["copies"] = max(4e-9 * numel / way["to_host"], 2e-9 * numel / way["to_device"])
    step = statistics.median(s[0] for s in steps)
    memory = None if before is None else {name: after[name] - before[name] for name in before}
    return {
        "step_seconds": step,
        "parts_seconds": parts,
        "step_over_largest_part": step / max(parts.values()),
        "bytes_moved_a_step": int(statistics.median(s[2] for s in steps)),
    }, memory


def _kernel_seconds(numel: int, rounds: int) -> float:
    """The CPU kernel on one subgroup with remainders, all in host memory."""
    (subgroup,) = cut([numel], numel, main_itemsize=2)
    record = torch.zeros(subgroup.record_bytes, dtype=torch.uint8)
    grad, weight = (torch.full((numel,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    rows = [Segment.of(0, numel, grad, weight)]
    with AdamKernel(default_threads(1)) as kernel:
        return statistics.median(
            _seconds(lambda: kernel.update(record.data_ptr(), subgroup.stride_numel, rows, [SCALARS], 2), "cpu")
            for _ in range(rounds)
        )


def same_bits(device: str, directory: Path, dtype: torch.dtype) -> bool:
    """Whether three steps with weights on ``device`` and on the CPU end in the same weights and state."""
    numels = (100_003, 1, 4096, 64_001)

    def digest(place: str) -> str:
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=generator).to(dtype).to(place) for n in numels]
        found = hashlib.sha256()
        optimizer = OffloadedAdamW(
            params, lr=1e-2, paths=[str(directory)], subgroup_size=20_000, host_memory="2MiB", name=f"{place}-{dtype}"
        )
        try:
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(dtype).to(place)
                optimizer.step()
            state = optimizer.state_dict()["state"]
        finally:
            optimizer.close()
        for tensor in [*params, *(t for i in sorted(state) for _, t in sorted(state[i].items()))]:
            found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    return digest(device) == digest("cpu")


def kernels_once() -> None:
    """Every kernel once, on device and pinned memory of odd sizes, several pieces each."""
    numel, kernels = 70_001, CudaKernels(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    grad = torch.randn(numel, device="cuda").bfloat16()
    weight, back, staged = grad.clone(), torch.zeros_like(grad), _pinned(numel)
    ends = [(0, 5), (5, 4096), (4099, numel)]
    for source, target in ((grad, staged), (staged, back)):
        rows = [Piece(source[a:].data_ptr(), target[a:].data_ptr(), b - a, BF16, BF16) for a, b in ends if a < b]
        kernels.copy(rows, stream=stream)
    for main_itemsize in (4, 2):
        (subgroup,) = cut([numel], numel, main_itemsize)
        record = torch.zeros(subgroup.record_bytes, dtype=torch.uint8, device="cuda")
        rows = [Segment(a, b - a, grad[a:].data_ptr(), weight[a:].data_ptr(), BF16, BF16, 0) for a, b in ends]
        kernels.update(record.data_ptr(), subgroup.stride_numel, rows, [SCALARS], main_itemsize, stream)
    sums, norm = torch.zeros(NORM_SUMS_NUMEL, device="cuda"), torch.zeros(1, device="cuda")
    tensors = [NormTensor(t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype]) for t in (grad, weight[1:], sums)]
    kernels.norm(tensors, norm.data_ptr(), sums.data_ptr(), stream=stream)
    torch.cuda.synchronize()
    print(f"kernels ran once; norm {norm.item():.3f}")


# --------------------------------------------------------------------------------------------- helpers


def _pinned(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.bfloat16, pin_memory=True)


def _gpu_memory(device: str) -> "dict[str, int] | None":
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"allocated_bytes": torch.cuda.memory_allocated(), "used_on_device_bytes": total - free}


def _seconds(work: "Callable[[], object]", device: str = "cuda") -> float:
    """Until ``work`` is done, on the device too."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.monotonic()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begin


def _rate(nbytes: int, rounds: int, work: "Callable[[], object]") -> float:
    """GB/s, the median; the first time does not count."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds: "Sequence[float]" = [_seconds(work, device) for _ in range(rounds + 1)][1:]
    return nbytes / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    sys.exit(main())
