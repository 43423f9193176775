"""What a person sees at start-up: what was decided, and how far the writing of the state is."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from . import __version__
from .adam.kernel import AdamKernel
from .ranks import RankContext
from .storage.numa import format_cpus, nodes_of
from .storage.statefile import free_bytes
from .tiers import Tiers
from .units import format_bytes

Progress = Callable[[int, int], None]
"""Called with bytes written so far and bytes in all."""


def describe(
    tiers: Tiers, rank: RankContext, kernel: AdamKernel, passing_count: int = 0, no_gpu_reason: str = ""
) -> str:
    """The options as they are used, then what this rank made of them: a line for the state, the memory and each path.

    Args:
        passing_count: subgroups that pass through GPU memory in the first step.
        no_gpu_reason: why the GPU updates nothing.
    """
    subgroups, residency = tiers.subgroups, tiers.residency
    numel = sum(subgroup.numel for subgroup in subgroups)
    itemsize = 8 + (subgroups[0].main_itemsize if subgroups else 4)
    share = sum(subgroups[i].numel for i in residency.residents) / numel if numel else 1.0
    lines = [
        f"mlp-offload: options\n{tiers.config.echo()}",
        f"mlp-offload: rank {rank.rank}, one of {rank.local_rank_count} on its node",
        f"  state                 {format_bytes(itemsize * numel)}: {numel} parameters of {itemsize} bytes in {len(subgroups)} "
        f"subgroups{'; masters as 16-bit remainders beside the bf16 weights' if itemsize == 10 else ''}",
        f"  host memory           {format_bytes(tiers.pool.region[1])}: {len(residency.residents)} resident subgroups "
        f"({share:.0%} of the state) and {residency.staging_count} buffers in motion",
        f"  Adam kernel           {kernel.variant}, threads: {kernel.threads}",
        f"  updates               {_updates(tiers, passing_count, no_gpu_reason)}",
        f"  cores                 {cores(rank)}",
    ]
    for index, (directory, file, rates) in enumerate(zip(tiers.directories, tiers.files, tiers.rates)):
        lines.append(
            f"  path                  {directory}: {tiers.homes_on(index)} subgroups, {format_bytes(file.nbytes)} with spare "
            f"slots in {file.path.relative_to(directory)}; {file.engine.kind}, "
            f"{'direct' if file.direct else 'through the page cache'}; {format_bytes(free_bytes(file.path.parent))} stay free\n"
            f"    first rates         {rates}"
        )
    if not tiers.files:
        where = "GPU memory and host memory hold" if residency.device_residents else "host memory holds"
        lines.append(f"  nothing goes to storage: {where} the whole state")
    return "\n".join(lines)


def _updates(tiers: Tiers, passing_count: int, no_gpu_reason: str) -> str:
    if tiers.device is None:
        return f"all on the CPU ({no_gpu_reason})" if no_gpu_reason else "all on the CPU"
    resident_count = len(tiers.residency.device_residents)
    return (
        f"{resident_count} subgroups stay and {passing_count} pass through on the GPU, in {format_bytes(tiers.device.nbytes)} "
        f"of its memory; {len(tiers.subgroups) - resident_count - passing_count} on the CPU"
    )


def header(tiers: Tiers, rank: RankContext, kernel: AdamKernel) -> "dict[str, Any]":
    """The same as data, for the telemetry: what a report needs beside the steps. Sizes are this rank's."""
    numel = sum(subgroup.numel for subgroup in tiers.subgroups)
    itemsize = 8 + (tiers.subgroups[0].main_itemsize if tiers.subgroups else 4)
    return {
        "version": __version__,
        "time": round(time.time(), 3),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "local_rank": rank.local_rank,
        "local_rank_count": rank.local_rank_count,
        "config": dataclasses.asdict(tiers.config),
        "numel": numel,
        "state_bytes": itemsize * numel,
        "subgroup_count": len(tiers.subgroups),
        "resident_count": len(tiers.residency.residents),
        "device_resident_count": len(tiers.residency.device_residents),
        "gpu_memory_bytes": tiers.device.nbytes if tiers.device is not None else 0,
        "staging_count": tiers.residency.staging_count,
        "buffer_bytes": tiers.pool.buffer_bytes,
        "host_memory_bytes": tiers.pool.region[1],
        "kernel": kernel.variant,
        "update_threads": kernel.threads,
        "cores": len(os.sched_getaffinity(0)),
        "paths": [
            {"directory": directory, "read": r.path.read, "write": r.path.write, "origin": r.origin}
            | {"subgroups": tiers.homes_on(index), "engine": file.engine.kind, "direct": file.direct}
            for index, (directory, file, r) in enumerate(zip(tiers.directories, tiers.files, tiers.rates))
        ],
    }


def cores(rank: RankContext) -> str:
    """The cores of this rank, with advice where its memory may end up far from them."""
    cpus, nodes = os.sched_getaffinity(0), nodes_of()
    text = format_cpus(cpus)
    if nodes:
        text += f" on NUMA node{'s' if len(nodes) > 1 else ''} {format_cpus(nodes)}"
    if len(nodes) > 1 and rank.local_rank_count > 1:
        text += (
            "; not bound: buffers and the threads that use them may be on different nodes. Bind each rank to the node of "
            "its GPU (srun --cpu-bind, numactl --cpunodebind)"
        )
    return text


@contextmanager
def progress(stream: "TextIO | None" = None, every_seconds: float = 5.0) -> "Iterator[Progress]":
    """A callback that shows how much of the state is written: a bar on a terminal, else a line now and then."""
    stream = stream or sys.stdout
    if not stream.isatty():
        yield _lines(stream, every_seconds)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    columns += (TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task("mlp-offload: writing the state", total=None)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _lines(stream: TextIO, every_seconds: float) -> Progress:
    begun = shown = time.monotonic()

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= every_seconds or (done_bytes >= total_bytes and shown > begun):
            shown = now
            done, total = format_bytes(done_bytes), format_bytes(total_bytes)
            rate = format_bytes(done_bytes / (now - begun))
            print(f"mlp-offload: writing the state: {done} of {total}, {rate}/s", file=stream, flush=True)

    return show
