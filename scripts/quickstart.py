"""Pre-train a small GPT with its optimizer state on two directories, and prove that the numbers are the stock ones.

Run it as ``bash scripts/quickstart.sh``, which also makes the environment. What happens:

    1. Real text (Python's own standard library) becomes tokens.
    2. A GPT trains on it, two ranks, with --optimizer-offload mlp; most of the state moves to and from storage each step.
    3. The first iterations are repeated with Megatron's stock distributed optimizer.
    4. Losses, gradient norms and all parameters of both runs are compared bit for bit.

The exit status is 0 only if they are identical, the loss fell and the kernel counted that the state really moved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
COMPARED = 10
"""Iterations that are repeated with the stock optimizer."""

MODEL = """
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64 --use-cpu-initialization
"""
TRAINING = """
    --bf16 --use-distributed-optimizer --micro-batch-size 8 --global-batch-size 32 --clip-grad 1.0 --seed 1234
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --adam-beta2 0.95
    --split 99,1,0 --eval-iters 0 --eval-interval 1000000 --num-workers 0 --log-interval 1
"""
# 1.8 million parameters a rank: 22 MB of state in 19 subgroups, of which the budget holds a few.
OFFLOAD = """
    --optimizer-offload mlp --mlp-offload-subgroup-size 100000 --mlp-offload-host-memory 8MiB
    --mlp-offload-staging-count 4
"""


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=80, help="iterations to train (default: 80)")
    parser.add_argument(
        "--paths",
        nargs="+",
        metavar="DIR",
        help="directories for the state, each best on a drive of its own (default: two below .work/)",
    )
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.iterations < COMPARED:
        parser.error(f"--iterations must be at least {COMPARED}: that many are compared with the stock optimizer")
    for path in options.paths or ():
        if not (os.path.isdir(path) and os.access(path, os.W_OK)):
            parser.error(f"--paths {path}: not a directory that can be written; make it first")
    if options.check_options:
        return 0
    return quickstart(options.iterations, options.paths)


def quickstart(iterations: int, paths: "list[str] | None") -> int:
    """Run all of it; returns the exit status."""
    import torch
    from compare_runs import judge, show
    from rich.console import Console

    console = Console(highlight=False)
    work = REPOSITORY / ".work"
    data = work / "data"
    run = REPOSITORY / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    run.mkdir(parents=True)
    paths = [str(Path(p).resolve()) for p in paths] if paths else default_paths(work)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = min(2, gpus) if gpus else 2

    console.rule("1/3 text")
    subprocess.run([sys.executable, str(SCRIPTS / "prepare_text.py"), str(data)], check=True)
    summary = json.loads((data / "summary.json").read_text())
    arguments = [
        *MODEL.split(),
        *TRAINING.split(),
        *data_arguments(data, summary),
        "--train-iters",
        str(iterations),
    ]
    arguments += ["--lr-decay-iters", str(iterations)]
    if gpus:
        arguments.append("--deterministic-mode")

    console.rule(f"2/3 pre-training with offload: {ranks} ranks, {f'{gpus} GPUs' if gpus else 'CPU'}")
    offload = [*OFFLOAD.split(), "--mlp-offload-telemetry", str(run / "telemetry")]
    for path in paths:
        offload += ["--mlp-offload-path", path]
    seconds = {"offloaded": train(console, run, "offloaded", ranks, [*arguments, *offload], iterations)}

    console.rule(f"3/3 the first {COMPARED} iterations with the stock optimizer")
    stock = ["--fused-adam", "--exit-interval", str(COMPARED)]
    seconds["stock"] = train(console, run, "stock", ranks, [*arguments, *stock], COMPARED)

    verdict = judge(run, ranks, COMPARED)
    show(console, verdict, run, seconds)
    return 0 if verdict.good else 1


def default_paths(work: Path) -> "list[str]":
    """Two directories in the repository; on one drive, so they show the mechanism and not the speed."""
    paths = [work / "path0", work / "path1"]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return [str(p) for p in paths]


def data_arguments(data: Path, summary: "dict[str, int | str]") -> "list[str]":
    """Megatron's flags for the tokens that prepare_text.py wrote.

    Megatron's cache of sample indices knows the data by its path only, so it lies beside the data and goes with it.
    """
    return [
        *("--data-path", str(data / str(summary["dataset"])), "--data-cache-path", str(data / "cache")),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(summary["vocab_size"])),
        *("--null-tokenizer-eod-id", str(summary["eod_id"])),
    ]


def train(console: Console, run: Path, name: str, ranks: int, arguments: "list[str]", iterations: int) -> float:
    """Start one training, show its progress, return its seconds; ends this program if it fails."""
    record, log = run / f"{name}-record", run / f"{name}.log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "mlp_offload", "run", str(SCRIPTS / "recorded_gpt.py")),
        *("--record", str(record), "--hash-at", str(COMPARED), *arguments),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # what --deterministic-mode asks for on GPUs
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    console.print(f"log: {log.relative_to(REPOSITORY)}")
    begin = time.monotonic()
    with open(log, "w") as output:
        output.write(" ".join(command) + "\n\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY)
        try:
            follow(console, process, record / f"rank{ranks - 1:04d}.jsonl", iterations)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        told = [line for line in lines if re.match(r"mlp-offload: rank|\w*(Error|Exception)\b", line)]
        console.print("\n".join(told or lines[-30:]), markup=False, soft_wrap=True)
        console.print(
            f"[red]the {name} run ended with status {process.returncode}[/]; all of its output: {log}", soft_wrap=True
        )
        raise SystemExit(1)
    return time.monotonic() - begin


def follow(console: Console, process: "subprocess.Popen[bytes]", record: Path, iterations: int) -> None:
    """Show the iterations as the rank writes them: a bar on a terminal, a line every tenth otherwise."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=iterations)
        told = 0
        while process.poll() is None:
            time.sleep(0.5)
            lines = read_lines(record)
            if not lines or lines[-1]["iteration"] == told:
                continue
            told, last = lines[-1]["iteration"], lines[-1]
            text = f"loss {float.fromhex(last['loss']):.3f}"
            progress.update(task, completed=told, description=text)
            if not console.is_terminal and (told % 10 == 0 or told == iterations):
                console.print(f"iteration {told:4d}/{iterations}  {text}  {last['seconds']:.2f} s an iteration")


def read_lines(record: Path) -> "list[dict]":
    """The iterations recorded so far; without line 0, and without a line that is not yet whole."""
    if not record.exists():
        return []
    whole = record.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole[1:]]


if __name__ == "__main__":
    sys.exit(main())
