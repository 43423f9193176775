"""Adam in memory, no storage: ours beside torch fused, DeepSpeedCPUAdam and the memory limit, in turn in one run.

    python benchmarks/adam.py [--params 100] [--threads 1 2] [--rounds 7] [--json OUT]

ours        our kernel: fp32 state, gradient in fp32 or bf16, bf16 weight written, in one pass; `step` writes no weight;
            `remainder` as in training with bf16 weights: 16 bits of each master, the weight is read, too
streams     trivial arithmetic over the same arrays (streams.cpp): the memory limit
torch       torch.optim.AdamW(fused=True): fp32 gradients only; `fp32` with, `step` without the copy to a bf16 weight
deepspeed   DeepSpeedCPUAdam, in its own environment: likewise, and `bf16` widens the gradients first, as ZeRO does

Numbers are 10**6 parameters a second, medians over rounds. `ratios` sets the same work side by side: `step` beside `step`,
`fp32` beside `fp32`, `bf16` beside `bf16`; `remainder` beside those of the others, which have no such thing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from mlp_offload.adam.kernel import AdamKernel, Segment, adam_scalars  # noqa: E402
from mlp_offload.plan.subgroups import cut  # noqa: E402
from mlp_offload.storage.buffers import BufferPool  # noqa: E402

REST_SECONDS = 0.05
"""Between two cases: OpenMP's threads spin for a while after their last work, and would take the next one's cores."""

GRADIENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Arrays:
    """One state record, gradients of both precisions and a weight, on huge pages where there are some."""

    def __init__(self, numel: int):
        self.numel = numel
        sizes = [4 * numel] * 4 + [2 * numel] * 2
        offsets = [sum(-(-size // 4096) * 4096 for size in sizes[:i]) for i in range(len(sizes) + 1)]
        self._pool = BufferPool(1, offsets[-1])
        self._lease = self._pool.lease()
        p, m, v, g = (torch.from_numpy(self._lease.array(offset, numel)) for offset in offsets[:4])
        g16, w = (
            torch.from_numpy(self._lease.array(offset, numel, "int16")).view(torch.bfloat16) for offset in offsets[4:6]
        )
        self.stride_numel = offsets[1] // 4
        self.main_param, self.exp_avg, self.exp_avg_sq, self.weight = p, m, v, w
        self.gradient = {"fp32": g, "bf16": g16}
        (self.subgroup,) = cut([numel], numel, main_itemsize=2)
        self._remainder_pool = BufferPool(1, self.subgroup.record_bytes)
        self.remainders = self._remainder_pool.lease()
        self.remainders.array(0, self.remainders.nbytes, "uint8")[:] = 0
        generator = torch.Generator().manual_seed(0)
        p.copy_(torch.randn(min(numel, 2**16), generator=generator).repeat(-(-numel // 2**16))[:numel])
        m.zero_(), v.zero_(), g.fill_(0.01), g16.fill_(0.01), w.zero_()


Timed = "dict[tuple[str, int, str], Callable[[], float]]"


def _timed(function: "Callable[[], Any]") -> "Callable[[], float]":
    def seconds() -> float:
        begin = time.monotonic()
        function()
        return time.monotonic() - begin

    return seconds


def our_kernel(arrays: Arrays, threads: int, stack: contextlib.ExitStack) -> "dict[str, Callable[[], float]]":
    kernel = stack.enter_context(AdamKernel(threads))
    scalars = [adam_scalars(1e-5, (0.9, 0.999), 1e-8, 0.01, 10)]
    segments = {
        name: [Segment.of(0, arrays.numel, gradient, arrays.weight)] for name, gradient in arrays.gradient.items()
    }
    segments["step"] = [Segment.of(0, arrays.numel, arrays.gradient["fp32"], None)]
    state, stride = arrays.main_param.data_ptr(), arrays.stride_numel
    calls = {name: _timed(lambda s=s: kernel.update(state, stride, s, scalars)) for name, s in segments.items()}
    record, padded = arrays.remainders.address, arrays.subgroup.stride_numel
    for name in GRADIENTS:
        calls[f"{name} remainder"] = _timed(
            lambda s=segments[name]: kernel.update(record, padded, s, scalars, main_itemsize=2)
        )
    return calls


def trivial_loop(arrays: Arrays, threads: int, library: ctypes.CDLL) -> "dict[str, Callable[[], float]]":
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (arrays.main_param, arrays.exp_avg, arrays.exp_avg_sq)]
    weight = ctypes.c_void_p(arrays.weight.data_ptr())

    def call(name: str) -> None:
        gradient = ctypes.c_void_p(arrays.gradient[name].data_ptr())
        library.streams(*pointers, gradient, int(name == "bf16"), weight, ctypes.c_int64(arrays.numel), threads)

    return {name: _timed(lambda name=name: call(name)) for name in GRADIENTS}


def torch_fused(arrays: Arrays, threads: int) -> "dict[str, Callable[[], float]]":
    parameter = torch.nn.Parameter(arrays.main_param)
    parameter.grad = arrays.gradient["fp32"]
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
    # The same memory as everybody else's: the state is handed to it, not allocated by it.
    optimizer.state[parameter] = {
        "step": torch.tensor(10.0),
        "exp_avg": arrays.exp_avg,
        "exp_avg_sq": arrays.exp_avg_sq,
    }

    def step(copy: bool) -> None:
        torch.set_num_threads(threads)
        optimizer.step()
        if copy:
            arrays.weight.copy_(parameter.detach())

    return {"step": _timed(lambda: step(False)), "fp32": _timed(lambda: step(True))}


@contextlib.contextmanager
def deepspeed_adam(numel: int, threads: int, venv: Path) -> "Iterator[dict[str, Callable[[], float]]]":
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),  # its operations have an OpenMP runtime of their own
        "PATH": f"{venv}/bin{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),
        "DS_ACCELERATOR": "cpu",
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(venv / "bin" / "python"), "-m", "benchmarks.systems.deepspeed_adam", str(numel), str(threads)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )

        def answer() -> str:
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise SystemExit(f"adam: DeepSpeedCPUAdam ended with {process.wait()}:\n{errors.read()[-2000:]}")
            return line

        def ask(what: str) -> float:
            process.stdin.write(what + "\n")
            return float(answer())

        try:
            answer()
            yield {name: lambda name=name: ask(name) for name in ("step", "fp32", "bf16")}
        finally:
            process.stdin.close()
            process.wait()


def build_streams(directory: str) -> ctypes.CDLL:
    """Compile the trivial loop for this machine.

    Raises:
        SystemExit: no C++ compiler, or it failed.
    """
    library = os.path.join(directory, "streams.so")
    source = str(REPOSITORY / "benchmarks" / "streams.cpp")
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-std=c++17", "-O3", "-march=native", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    try:
        built = subprocess.run([*command, "-pthread", source, "-o", library], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"adam: no C++ compiler {compiler[0]}: {error.strerror}") from error
    if built.returncode != 0:
        raise SystemExit(f"adam: {' '.join(compiler)} failed:\n{built.stderr}")
    return ctypes.CDLL(library)


def run(options: argparse.Namespace) -> "dict[str, Any]":
    """Rates by system, threads and gradient, and ours against the others."""
    numel = int(options.params * 1e6) // 1000 * 1000
    notes = []
    with contextlib.ExitStack() as stack:
        library = build_streams(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlp-offload-adam-")))
        venv = Path(options.deepspeed_venv).resolve()
        with_deepspeed = (venv / "ready").exists()
        if not with_deepspeed:
            notes.append(f"deepspeed is left out: no environment at {venv}; make it with benchmarks/setup_deepspeed.sh")
        arrays = Arrays(numel)
        cases: Timed = {}
        for threads in options.threads:
            systems = {
                "ours": our_kernel(arrays, threads, stack),
                "streams": trivial_loop(arrays, threads, library),
                "torch": torch_fused(arrays, threads),
            }
            if with_deepspeed:
                systems["deepspeed"] = stack.enter_context(deepspeed_adam(numel, threads, venv))
            for name, calls in systems.items():
                cases |= {(name, threads, gradient): call for gradient, call in calls.items()}
        seconds: "dict[tuple[str, int, str], list[float]]" = {case: [] for case in cases}
        for number in range(options.rounds + 1):
            for case in cases if number % 2 == 0 else reversed(cases):
                time.sleep(REST_SECONDS)
                elapsed = cases[case]()
                if number > 0:  # the first round warms up
                    seconds[case].append(elapsed)
    rates = {case: numel / statistics.median(values) for case, values in seconds.items()}
    result: "dict[str, Any]" = {"settings": vars(options) | {"parameters": numel}, "notes": notes, "ratios": {}}
    for (name, threads, gradient), rate in rates.items():
        result.setdefault(name, {}).setdefault(str(threads), {})[gradient] = {
            "parameters_per_second": rate,
            "spread": [numel / max(seconds[name, threads, gradient]), numel / min(seconds[name, threads, gradient])],
        }
    for threads in options.threads:
        for other in ("deepspeed", "torch", "streams"):
            for ours in ("step", "fp32", "bf16", "fp32 remainder", "bf16 remainder"):
                theirs = (other, threads, ours.split()[0])
                if theirs in rates:
                    name = f"ours_over_{other}_{ours.replace(' ', '_')}_{threads}"
                    result["ratios"][name] = rates["ours", threads, ours] / rates[theirs]
    return result


def show(result: "dict[str, Any]", console: Console) -> None:
    table = Table("system", "threads", "gradient", "10**6 parameters/s", "spread")
    for name in ("ours", "deepspeed", "torch", "streams"):
        for threads, cases in result.get(name, {}).items():
            for gradient, case in cases.items():
                low, high = (rate / 1e6 for rate in case["spread"])
                rate = case["parameters_per_second"] / 1e6
                table.add_row(name, threads, gradient, f"{rate:.0f}", f"{low:.0f}-{high:.0f}")
    console.print(table)
    for name, value in result["ratios"].items():
        console.print(f"{name:<40} {value:.3f}")
    for note in result["notes"]:
        console.print(f"note: {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100, help="million parameters (default: 100)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed-venv", default=str(REPOSITORY / ".work" / "deepspeed"), metavar="DIR")
    parser.add_argument("--json", metavar="OUT", help="also write everything to this file")
    options = parser.parse_args()
    if options.params < 0.001 or options.rounds < 1 or min(options.threads) < 1:
        parser.error("--params must be at least 0.001, --rounds and --threads at least 1")
    result = run(options)
    show(result, Console())
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
