"""On which NUMA nodes this process may run. Its buffers are first touched, and so placed, by its own threads there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path


def nodes_of(cpus: "Collection[int] | None" = None, root: Path = Path("/sys/devices/system/node")) -> "list[int]":
    """NUMA nodes that ``cpus`` (None: those this process is bound to) belong to; empty where the kernel tells none."""
    cpus = set(os.sched_getaffinity(0) if cpus is None else cpus)
    nodes = []
    for directory in root.glob("node[0-9]*"):
        try:
            listed = parse_cpus((directory / "cpulist").read_text())
        except OSError:
            continue
        if cpus & listed:
            nodes.append(int(directory.name.removeprefix("node")))
    return sorted(nodes)


def parse_cpus(text: str) -> "set[int]":
    """The kernel's list format: ``"0-3,8"`` is {0, 1, 2, 3, 8}."""
    found: "set[int]" = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def format_cpus(cpus: "Collection[int]") -> str:
    """The other way: {0, 1, 2, 3, 8} is ``"0-3,8"``."""
    runs: "list[list[int]]" = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
