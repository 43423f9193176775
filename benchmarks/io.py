"""Our storage engines beside fio on one path, with the same block size and iodepth, in turn in one run.

    python benchmarks/io.py --capped 400:400 [--seconds 4] [--rounds 3] [--json OUT]
    python benchmarks/io.py --path /nvme/scratch

Each engine (io_uring, threads) reads, writes, and does both at once; fio does it with io_uring, and with as many psync
jobs as our engine has threads. Bytes are those of the device's own counters, over a span that begins when the transfer has
been under way for a while, for ours and for fio alike. Ours computes the crc32c of every byte, as in training
(`--no-checksums`: not), fio nothing. `ratios` are ours over fio, medians over rounds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.capped import CapError, capped, parse_cap  # noqa: E402
from benchmarks.systems.worker import device_of, read_counters  # noqa: E402
from mlp_offload.errors import OffloadError  # noqa: E402
from mlp_offload.storage.buffers import BufferPool  # noqa: E402
from mlp_offload.storage.engine import direct_supported, open_engine  # noqa: E402
from mlp_offload.units import parse_bytes  # noqa: E402

ENGINES = ("io_uring", "threads")
OPERATIONS = ("read", "write", "mixed")
BLOCKS_PER_REQUEST = 4
FIO_START_SECONDS = 20.0


class IoBenchmarkError(Exception):
    """fio is missing or failed."""


class Span:
    """Rates of a device between ``ramp`` and ``ramp + seconds`` after the start, from its counters."""

    def __init__(self, device: str, ramp: float, seconds: float):
        self._device, self._ramp, self._seconds = device, ramp, seconds
        self._start, self._samples = time.monotonic(), []
        self.rates: "tuple[float, float] | None" = None  # (read, write), bytes/s

    def tick(self) -> bool:
        """Read the counters when it is time to; True while the span is not over."""
        now = time.monotonic() - self._start
        if now >= self._ramp + len(self._samples) * self._seconds and self.rates is None:
            self._samples.append((time.monotonic(), read_counters([self._device])[0]))
            if len(self._samples) == 2:
                (begin, before), (end, after) = self._samples
                self.rates = tuple((after[k] - before[k]) / (end - begin) for k in (0, 1))
        return self.rates is None


def ours(
    file: str, engine_kind: str, operation: str, device: str, options: argparse.Namespace
) -> "tuple[float, float]":
    """(read, written) bytes/s of our engine. Requests follow each other so closely that its queue is always full."""
    request_bytes = BLOCKS_PER_REQUEST * options.block_size
    directions = ("read", "write") if operation == "mixed" else (operation,)
    depth = max(2, -(-2 * options.iodepth // (BLOCKS_PER_REQUEST * len(directions))))
    support = direct_supported(os.path.dirname(file))
    with (
        contextlib.closing(BufferPool(depth * len(directions), request_bytes)) as pool,
        open_engine(
            file,
            kind=engine_kind,
            direct=support.supported,
            alignment=support.alignment,
            threads=options.iodepth,
            iodepth=options.iodepth,
            block_size=options.block_size,
        ) as engine,
        contextlib.ExitStack() as leases,
    ):
        engine.register_buffers(*pool.region, keepalive=pool)
        free = {d: [leases.enter_context(pool.lease()) for _ in range(depth)] for d in directions}
        flying: "dict[str, collections.deque[Any]]" = {d: collections.deque() for d in directions}
        slots = options.size // request_bytes
        position = {d: i * slots // len(directions) for i, d in enumerate(directions)}
        span = Span(device, options.ramp, options.seconds)
        while span.tick():
            for d in directions:
                while free[d]:
                    lease = free[d].pop()
                    start = getattr(engine, d)
                    offset = position[d] % slots * request_bytes
                    flying[d].append((start(offset, lease.address, request_bytes, checksum=options.checksums), lease))
                    position[d] += 1
                while flying[d] and flying[d][0][0].done():
                    future, lease = flying[d].popleft()
                    future.result()
                    free[d].append(lease)
            waiting = [flying[d][0][0] for d in directions if flying[d]]
            if waiting:
                min(waiting, key=lambda future: future.submitted_seconds).wait(0.002)
        for future, _ in [item for d in directions for item in flying[d]]:
            future.result()
    return span.rates


def fio(file: str, engine_kind: str, operation: str, device: str, options: argparse.Namespace) -> "tuple[float, float]":
    """(read, written) bytes/s of fio.

    Raises:
        IoBenchmarkError: it failed, or moved nothing.
    """
    jobs = options.iodepth if engine_kind == "threads" else 1
    command = [
        "fio",
        "--name=bench",
        f"--filename={file}",
        "--direct=1",
        f"--rw={'rw' if operation == 'mixed' else operation}",
        f"--bs={options.block_size}",
        f"--size={options.size // jobs}",
        f"--offset_increment={options.size // jobs}",
        f"--numjobs={jobs}",
        f"--iodepth={options.iodepth if jobs == 1 else 1}",
        f"--ioengine={'io_uring' if engine_kind == 'io_uring' else 'psync'}",
        "--thread",
        "--time_based",
        f"--runtime={int(options.ramp + options.seconds + FIO_START_SECONDS) + 1}",
    ]
    before = read_counters([device])
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + FIO_START_SECONDS
            while read_counters([device]) == before:
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise IoBenchmarkError(f"fio moved nothing: {' '.join(command)}\n{output.read()[-2000:]}")
                time.sleep(0.01)
            span = Span(device, options.ramp, options.seconds)
            while span.tick():
                time.sleep(0.002)
            if process.poll() is not None:
                output.seek(0)
                raise IoBenchmarkError(f"fio ended early: {' '.join(command)}\n{output.read()[-2000:]}")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(FIO_START_SECONDS)
    return span.rates


@contextlib.contextmanager
def open_path(options: argparse.Namespace) -> "Iterator[tuple[str, tuple[int, int] | None]]":
    """The directory and its caps (read, write), bytes/s."""
    if options.path:
        yield options.path, None
        return
    with capped([options.capped], int(options.size * 1.2) + 128 * 2**20, options.capped_where) as paths:
        yield paths[0].directory, options.capped


def run(options: argparse.Namespace) -> "dict[str, Any]":
    if shutil.which("fio") is None:
        raise IoBenchmarkError("fio is not installed (Debian: apt-get install fio)")
    rates: "dict[tuple[str, str, str], list[tuple[float, float]]]" = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        directory, caps = stack.enter_context(open_path(options))
        device = device_of(directory)
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlp-offload-io-", dir=directory))
        file = os.path.join(work, "data")
        with open(file, "wb") as data:  # every block is really written: holes would be read without the device
            block = os.urandom(2**20)
            for _ in range(options.size // len(block)):
                data.write(block)
            os.fsync(data.fileno())
        cases = [(kind, operation) for kind in options.engines for operation in OPERATIONS]
        for number in range(options.rounds):
            for kind, operation in cases:
                for name, measure in (
                    (("ours", ours), ("fio", fio)) if number % 2 == 0 else (("fio", fio), ("ours", ours))
                ):
                    rates[name, kind, operation].append(measure(file, kind, operation, device, options))
    result: "dict[str, Any]" = {"settings": vars(options) | {"caps": caps}, "ratios": {}, "errors": []}
    total = {case: statistics.median(map(sum, values)) for case, values in rates.items()}
    for (name, kind, operation), values in rates.items():
        share = None
        if caps is not None:
            shares = [statistics.median(rate[k] for rate in values) / caps[k] for k in (0, 1)]
            share = max(shares)
            # What was let through before the span and came back in it counts, too: at most one full queue.
            queue_bytes = options.iodepth * options.block_size
            if any(round(shares[k] - queue_bytes / (caps[k] * options.seconds), 2) > 1.00 for k in (0, 1)):
                result["errors"].append(
                    f"{name} {kind} {operation}: {share:.3f} of the cap; above 1.00 the measurement is wrong (the cap does not "
                    "hold, or the span is too short)"
                )
        result.setdefault(name, {}).setdefault(kind, {})[operation] = {
            "bytes_per_second": total[name, kind, operation],
            "spread": [min(map(sum, values)), max(map(sum, values))],
            "read_bytes_per_second": statistics.median(rate[0] for rate in values),
            "written_bytes_per_second": statistics.median(rate[1] for rate in values),
            "share_of_cap": share,
        }
    for kind, operation in cases:
        result["ratios"][f"{kind}_{operation}"] = total["ours", kind, operation] / total["fio", kind, operation]
    return result


def show(result: "dict[str, Any]", console: Console) -> None:
    table = Table("engine", "operation", "ours MB/s", "spread", "fio MB/s", "spread", "ours / fio", "ours / cap")
    for kind, operations in result["ours"].items():
        for operation, mine in operations.items():
            other = result["fio"][kind][operation]
            spreads = [f"{r['spread'][0] / 1e6:.0f}-{r['spread'][1] / 1e6:.0f}" for r in (mine, other)]
            table.add_row(
                kind,
                operation,
                f"{mine['bytes_per_second'] / 1e6:.0f}",
                spreads[0],
                f"{other['bytes_per_second'] / 1e6:.0f}",
                spreads[1],
                f"{result['ratios'][f'{kind}_{operation}']:.3f}",
                "-" if mine["share_of_cap"] is None else f"{mine['share_of_cap']:.3f}",
            )
    console.print(table)
    for error in result["errors"]:
        console.print(f"[bold red]WRONG[/]: {error}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--path", metavar="DIR", help="a directory on an idle local device")
    where.add_argument("--capped", type=parse_cap, metavar="READ:WRITE", help="make a path of this speed, MB/s")
    parser.add_argument("--capped-where", metavar="DIR", help="directory for its image (default: /var/tmp)")
    parser.add_argument("--size", type=parse_bytes, default=2**29, help="of the file (default: 512MiB)")
    parser.add_argument("--block-size", type=parse_bytes, default=2**21, help="default: 2MiB, as in training")
    parser.add_argument(
        "--iodepth", type=int, default=8, help="blocks in flight; threads of the threads engine (default: 8)"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--ramp", type=float, default=1.0, help="seconds before the span (default: 1)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the span (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-checksums", dest="checksums", action="store_false")
    parser.add_argument("--json", metavar="OUT", help="also write everything to this file")
    options = parser.parse_args()
    if options.iodepth < 1 or options.rounds < 1 or options.seconds <= 0 or options.block_size < 4096:
        parser.error("--iodepth and --rounds must be at least 1, --seconds above 0, --block-size at least 4096")
    if options.size < 2 * BLOCKS_PER_REQUEST * options.block_size * options.iodepth:
        parser.error("--size must hold at least 8 x iodepth blocks")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        result = run(options)
    except (IoBenchmarkError, CapError, OffloadError, RuntimeError) as error:
        sys.exit(f"io: {error}")
    show(result, Console(width=None if sys.stdout.isatty() else 120))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
